"""A running stack with its tenants, for one group of figures."""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

from bench.fairness.load import Ask, Tenant, gateway_stubs
from bench.fairness.machine import CpuMeter
from bench.figures import Figure
from service_kit.api_key import mint_api_key
from service_kit.garbage import forget_startup_objects
from service_kit.ids import KeyId, TenantId
from sluice.local.services import Service
from state_store.postgres.store import PostgresStore
from state_store.quota.port import QuotaSubject
from state_store.tenant_store import NewKey, NewTenant, TenantStore
from state_store.tenants import UNLIMITED, QuotaLimits
from tests.support.stack import RunningStack, eventually, running_stack

STEP_S = 0.02
_ACTOR = "operator:bench"
_PROBE = "probe"
"""A tenant whose requests only show that the stack is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`scale` shortens or lengthens what is measured; the limits are meant for 1."""

    seed: int
    scale: float = 1.0

    def seconds(self, usual_s: float) -> float:
        return usual_s * self.scale

    def count(self, usual: int) -> int:
        return max(1, round(usual * self.scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPlan:
    """A tenant with one key."""

    name: str
    weight: float = 1.0
    limits: QuotaLimits = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What runs. `slots` sequences at once on each worker, in `num_blocks` blocks of 16 tokens."""

    tenants: Sequence[TenantPlan]
    slots: int = 8
    step_s: float = STEP_S
    num_blocks: int = 4096
    prefill_tokens_per_s: float = 0.0
    workers: int = 1
    gateways: int = 1
    schedulers: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    context_length: int = 8192


class Arena:
    """What a measurement works with."""

    def __init__(
        self, stack: RunningStack, tenants: dict[str, Tenant], subjects: dict[str, QuotaSubject], plan: Plan
    ) -> None:
        self.stack = stack
        self.tenants = tenants
        self.subjects = subjects
        self.plan = plan
        self.rng = random.Random(plan.seed)  # noqa: S311
        self.cpu = CpuMeter(self._pids)

    def _pids(self) -> list[int]:
        local = self.stack.local
        pids = [child.pid for child in local.services.values()]
        return [pid for pid in (*pids, local.postgres.pid, local.valkey.pid) if pid is not None]

    async def until_taking(self) -> None:
        """Every gateway takes requests again, and they are answered."""
        probe = self.tenants[_PROBE]
        ask = Ask(prompt="probe", output_tokens=1)

        async def all_take() -> bool:
            calls = await asyncio.gather(
                *(probe.generate(ask, gateway=number, timeout_s=10) for number in range(len(probe.stubs)))
            )
            return all(call.is_whole for call in calls)

        await eventually(all_take, what="every gateway takes requests")

    async def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """Of the durable record."""

        def ask() -> list[dict[str, Any]]:
            with psycopg.connect(self.stack.local.dsn, row_factory=dict_row) as connection:
                return connection.execute(query, parameters).fetchall()

        return await asyncio.to_thread(ask)


Measure = Callable[[Arena], Awaitable[Sequence[Figure]]]


def run(setting: Setting, measure: Measure, plan: Plan) -> Sequence[Figure]:
    """Starts the stack, makes the tenants, measures, stops the stack."""
    counts = {
        Service.GATEWAY: setting.gateways,
        Service.SCHEDULER: setting.schedulers,
        Service.GPU_WORKER: setting.workers,
    }
    engine_settings = {
        "num_blocks": setting.num_blocks,
        "max_running": setting.slots,
        "prefill_tokens_per_s": setting.prefill_tokens_per_s,
        "has_prompt_faults": False,
    }
    with running_stack(
        tokens_per_s=1 / setting.step_s,
        counts=counts,
        engine_settings=engine_settings,
        overrides={"SLUICE_LOG_LEVEL": "WARNING", **setting.environment},
        context_length=setting.context_length,
    ) as stack:
        forget_startup_objects()  # a pause of this process would look like one of the service
        return asyncio.run(_measure(stack, setting, measure, plan))


async def _measure(stack: RunningStack, setting: Setting, measure: Measure, plan: Plan) -> Sequence[Figure]:
    keys = await _create_tenants(stack.local.dsn, [TenantPlan(name=_PROBE), *setting.tenants])
    async with gateway_stubs(stack.local.gateways) as stubs:
        tenants = {name: Tenant(name, key.text, stubs) for name, key in keys.items()}
        subjects = {name: key.subject for name, key in keys.items()}
        arena = Arena(stack, tenants, subjects, plan)
        await arena.until_taking()
        return await measure(arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreatedKey:
    text: str = field(repr=False)
    subject: QuotaSubject


async def _create_tenants(dsn: str, plans: Sequence[TenantPlan]) -> dict[str, _CreatedKey]:
    """Each with one key, by the tenants' names."""
    store = PostgresStore(dsn)
    await store.open()
    try:
        return {plan.name: await _create_tenant(store, plan) for plan in plans}
    finally:
        await store.close()


async def _create_tenant(store: TenantStore, plan: TenantPlan) -> _CreatedKey:
    tenant_id, key_id = TenantId(plan.name), KeyId(str(uuid.uuid4()))
    new = NewTenant(tenant_id=tenant_id, name=plan.name, weight=plan.weight, limits=plan.limits)
    await store.create_tenant(new, actor=_ACTOR)
    text, minted = mint_api_key()
    key = NewKey(key_id=key_id, tenant_id=tenant_id, prefix=minted.prefix, key_hash=minted.key_hash)
    await store.create_key(key, actor=_ACTOR)
    subject = QuotaSubject(tenant_id=tenant_id, key_id=key_id, tenant_limits=plan.limits, key_limits=key.limits)
    return _CreatedKey(text=text, subject=subject)
