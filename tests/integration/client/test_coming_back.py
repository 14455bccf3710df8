"""The client after a break: at the next token, as long as it is patient, and never behind another output."""

from datetime import timedelta
from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2_grpc, types_pb2
from service_kit.delta import Cursor
from service_kit.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidArgumentError,
    QuotaExceededError,
    Reason,
    UnavailableError,
)
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import (
    Accepted,
    Event,
    GaveUpError,
    Output,
    Reconnecting,
    StreamBrokenError,
)
from tests.integration.client.steps import FakeTime, append_all, collect, output_ids
from tests.support.scripted_service import OUTPUT, ScriptedService, Step, cursor_at


@pytest.mark.parametrize("position", range(len(OUTPUT) + 1))
async def test_a_stream_cut_at_any_position_continues_at_the_next_token_with_the_same_request_id(
    client: SluiceClient, service: ScriptedService, position: int
) -> None:
    service.steps = [Step(until=position, error=UnavailableError("restarting"))]
    events = await collect(client.generate("m", "hi"))
    assert output_ids(events) == OUTPUT
    assert [type(event) for event in events].count(Accepted) == 1
    first, second = service.requests
    assert first.request_id == second.request_id != ""
    assert first.spec == second.spec
    assert Cursor(sequence_number=second.cursor.sequence_number, chain=second.cursor.chain) == cursor_at(position)


@pytest.mark.parametrize(
    "step",
    [
        Step(until=4, is_ending_early=True),
        Step(until=4, bare_code=grpc.StatusCode.CANCELLED),
        Step(until=4, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=0, is_accepting=False, error=UnavailableError("no", reason=Reason.DRAINING)),
    ],
    ids=["ends without a finish reason", "cancelled by the server", "no error info", "refused before acceptance"],
)
async def test_every_way_a_connection_breaks_is_survived(
    client: SluiceClient, service: ScriptedService, step: Step
) -> None:
    service.steps = [step]
    events = await collect(client.generate("m", "hi"))
    assert output_ids(events) == OUTPUT
    assert any(isinstance(event, Reconnecting) for event in events)


async def test_a_killed_server_is_survived_by_the_next_gateway(service: ScriptedService, time: FakeTime) -> None:
    dying = grpc.aio.server()
    servicer = ScriptedService(steps=[Step(until=8, is_hanging=True)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, dying)
    target = f"127.0.0.1:{dying.add_insecure_port('127.0.0.1:0')}"
    await dying.start()
    settings = ClientSettings(targets=(target, service.target), api_key="k")
    async with SluiceClient(settings, sleep=time.sleep, clock=time.clock) as client:
        events = []
        async for event in client.generate("m", "hi"):
            events.append(event)
            if isinstance(event, Output) and event.cursor.sequence_number == 3:
                await dying.stop(None)
    assert output_ids(events) == OUTPUT
    assert len(service.requests) == 1


async def test_the_delay_honours_retry_info_and_grows_otherwise(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    busy = UnavailableError("full", reason=Reason.QUEUE_FULL, retry_after=timedelta(seconds=2.5))
    service.steps = [
        Step(until=0, is_accepting=False, error=busy),
        Step(until=0, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=0, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=3, bare_code=grpc.StatusCode.UNAVAILABLE),
    ]
    await collect(client.generate("m", "hi"))
    # RetryInfo as it stands (jitter 0); then half of 2 and of 4; output starts the series again.
    assert time.sleeps == [2.5, 1.0, 2.0, 0.5]


async def test_it_gives_up_after_the_stated_time_and_says_how_to_continue(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    service.steps = [Step(until=5, bare_code=grpc.StatusCode.UNAVAILABLE)]
    service.steps += [Step(until=5, error=UnavailableError("down", reason=Reason.STORE_UNAVAILABLE))] * 30
    with pytest.raises(GaveUpError) as caught:
        await collect(client.generate("m", "hi", request_id="r-9"))
    assert 5.0 <= time.now_s <= 10.0
    assert caught.value.reason == Reason.STORE_UNAVAILABLE
    assert (caught.value.request_id, caught.value.cursor) == ("r-9", cursor_at(5))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidArgumentError("spec.sampling.top_p", "must be above 0"), InvalidArgumentError),
        (AlreadyExistsError("other arguments"), AlreadyExistsError),
        (QuotaExceededError("too many", subject="concurrency"), QuotaExceededError),
        (DataLossError("contradicted"), DataLossError),
    ],
)
async def test_an_answer_that_repeating_cannot_change_is_raised_at_once_with_its_details(
    client: SluiceClient, service: ScriptedService, error: Any, expected: type[Exception]
) -> None:
    service.steps = [Step(until=0, is_accepting=False, error=error)]
    with pytest.raises(expected) as caught:
        await collect(client.generate("m", "hi"))
    assert caught.value.reason == error.reason
    assert getattr(caught.value, "violations", ()) == getattr(error, "violations", ())
    assert len(service.requests) == 1


def _skip_a_number(delta: types_pb2.Delta) -> None:
    delta.first_sequence_number += 1


def _change_a_token(delta: types_pb2.Delta) -> None:
    delta.token_ids[0] += 1


def _repeat_a_number(delta: types_pb2.Delta) -> None:
    delta.first_sequence_number = 1


def _leave_out_a_log_probability(delta: types_pb2.Delta) -> None:
    delta.logprobs.extend([types_pb2.TokenLogprob()] * (len(delta.token_ids) - 1))


@pytest.mark.parametrize("tamper", [_skip_a_number, _change_a_token, _leave_out_a_log_probability])
async def test_output_that_does_not_continue_what_was_shown_is_never_passed_on(
    client: SluiceClient, service: ScriptedService, tamper: Any
) -> None:
    service.steps = [Step(until=6, bare_code=grpc.StatusCode.UNAVAILABLE), Step(tamper=tamper)]
    seen: list[Event] = []
    with pytest.raises(StreamBrokenError):
        await append_all(seen, client.generate("m", "hi"))
    assert output_ids(seen) == OUTPUT[:6]


async def test_tokens_that_were_shown_already_are_refused_when_they_come_again(
    client: SluiceClient, service: ScriptedService
) -> None:
    service.steps = [Step(tamper=_repeat_a_number)]
    with pytest.raises(StreamBrokenError, match="expected token 4 next, the server sent 1"):
        await collect(client.generate("m", "hi"))


async def test_a_unary_call_is_repeated_until_the_service_is_back(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    service.steps = [Step(bare_code=grpc.StatusCode.UNAVAILABLE), Step(error=UnavailableError("down"))]
    assert await client.cancel(generation_id="g-1") == "CANCELLED"
    assert len(service.requests) == 3
    assert len(time.sleeps) == 2
