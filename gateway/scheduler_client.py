"""Calls to the schedulers. Any replica answers, so a call that one cannot take goes to the next."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import grpc

from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from service_kit.errors import Reason, UnavailableError
from service_kit.grpc_client import open_channel
from service_kit.internal_access import InternalAccess
from service_kit.logging import get_logger
from service_kit.rpc_status import parse_rpc_error, to_error

ResponseT = TypeVar("ResponseT")

_CALL_TIMEOUT = timedelta(seconds=5)
_FINAL_REASONS = frozenset({Reason.QUEUE_FULL})
"""Refusals that speak for all replicas: another one would say the same."""

_log = get_logger()


class SchedulerClient:
    """Stubs of all configured schedulers. Mutable state: which one answered last; it is asked first.

    Both calls are idempotent (Submit by request id, Cancel by nature), so one that may or may not have been carried out
    is simply repeated at the next replica.
    """

    def __init__(self, targets: Sequence[str], *, access: InternalAccess) -> None:
        self._targets = tuple(targets)
        self._channels = [
            open_channel(target, internal_token=access.token, tls=access.client_tls) for target in targets
        ]
        self._stubs: list[Any] = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in self._channels]
        self._preferred = 0

    async def submit(self, request: scheduler_pb2.SubmitRequest) -> scheduler_pb2.SubmitResponse:
        """Raises AlreadyExistsError, QuotaExceededError, UnavailableError and what else the scheduler refuses with."""

        async def ask(stub: Any) -> scheduler_pb2.SubmitResponse:
            try:
                response: scheduler_pb2.SubmitResponse = await stub.Submit(
                    request, timeout=_CALL_TIMEOUT.total_seconds()
                )
            finally:
                request.is_new = False  # it may be committed, whatever came back
            return response

        return await self._call(ask)

    async def cancel(self, request: scheduler_pb2.CancelRequest) -> scheduler_pb2.CancelResponse:
        """Raises NotFoundError, UnavailableError."""
        return await self._call(lambda stub: stub.Cancel(request, timeout=_CALL_TIMEOUT.total_seconds()))

    async def _call(self, call: Callable[[Any], Awaitable[ResponseT]]) -> ResponseT:
        first = self._preferred
        last_error = UnavailableError("no scheduler is configured", reason=Reason.NO_SCHEDULER)
        for offset in range(len(self._stubs)):
            index = (first + offset) % len(self._stubs)
            try:
                response = await call(self._stubs[index])
            except grpc.aio.AioRpcError as rpc_error:
                error = to_error(parse_rpc_error(rpc_error))
                if not isinstance(error, UnavailableError) or error.reason in _FINAL_REASONS:
                    raise error from rpc_error
                _log.warning("scheduler_unavailable", scheduler=self._targets[index], error=str(error))
                last_error = error
            else:
                self._preferred = index
                return response
        if last_error.reason == Reason.UNAVAILABLE:
            # gRPC's own words about addresses are of no use to the caller.
            raise UnavailableError("no scheduler can be reached", reason=Reason.NO_SCHEDULER) from last_error
        raise last_error

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)
