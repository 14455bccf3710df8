"""What a worker counts of its engines' speculation."""

import asyncio
from dataclasses import replace
from datetime import timedelta

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from gpu_worker.engine.frames import OutputFrame
from gpu_worker.engine.port import Capabilities, LoadReport, StepOutput
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.supervisor import EngineLostError
from gpu_worker.worker import Worker, WorkerTimes

CAPABILITIES = Capabilities(
    engine="native", model="m", model_revision="r", precision="fp32", context_length=64, vocab_size=9, num_blocks=4,
    block_size=16, max_running=2,
)  # fmt: skip
NOTHING = LoadReport(
    step=0, num_running=0, num_waiting=0, max_running=2, largest_batch=0, num_free_blocks=4, num_blocks=4, block_size=16,
    kv_waste=0.0,
)  # fmt: skip
SOME = replace(NOTHING, step=7, num_draft_steps=2, num_draft_tokens=9, num_accepted_draft_tokens=4, is_speculating=True)
MORE = replace(SOME, step=8, num_draft_steps=3, num_draft_tokens=12, is_speculating=False, num_speculation_stops=1)
OF_A_NEW_ENGINE = replace(NOTHING, step=1, num_draft_steps=1, num_draft_tokens=5, num_accepted_draft_tokens=5)


class Counted:
    """Metrics of a worker and what a reader finds of them."""

    def __init__(self):
        self._reader = InMemoryMetricReader()
        self.metrics = WorkerMetrics(MeterProvider([self._reader]).get_meter("tests"))

    def values(self):
        """By name; metrics that nothing was counted in are absent."""
        data = self._reader.get_metrics_data()
        return {
            metric.name.removeprefix("sluice.speculation."): point.value
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


def test_counters_grow_by_what_a_report_has_more_than_the_one_before():
    counted = Counted()
    counted.metrics.take(SOME)
    assert counted.values() == {"steps": 2, "proposed_tokens": 9, "accepted_tokens": 4, "is_on": 1}
    counted.metrics.take(MORE)
    assert counted.values() == {"steps": 3, "proposed_tokens": 12, "accepted_tokens": 4, "stops": 1, "is_on": 0}


def test_an_engine_that_does_not_speculate_is_off():
    counted = Counted()
    counted.metrics.take(replace(NOTHING, step=1))
    assert counted.values() == {"is_on": 0}


class ScriptedEngine:
    """Implements SupervisedEngine: sends these reports and is lost then."""

    is_progressing = True

    def __init__(self, *reports):
        self._reports = list(reports)

    async def wait_ready(self, timeout):
        return CAPABILITIES

    async def next_frame(self):
        if not self._reports:
            raise EngineLostError("it is a test")
        load = self._reports.pop(0)
        return OutputFrame(output=StepOutput(step=load.step, outputs=()), load=load, num_pauses=0)

    async def ack(self, step): ...

    async def watch(self, limits):
        await asyncio.Event().wait()

    def read_untried(self):
        return None

    async def close(self, grace): ...


async def test_a_new_engine_is_counted_on_top_of_the_one_that_was_lost():
    counted = Counted()
    engines = [ScriptedEngine(SOME, MORE), ScriptedEngine(OF_A_NEW_ENGINE)]

    async def spawn():
        return engines.pop(0)

    async def announce(session):
        await asyncio.Event().wait()

    def take(load):
        counted.metrics.take(load)
        if load is OF_A_NEW_ENGINE:
            worker.drain()

    worker = Worker(
        spawn=spawn,
        announce=announce,
        times=WorkerTimes(restart_wait=timedelta(0)),
        clock=lambda: 0.0,
        on_finish=lambda *_: None,
        on_load=take,
    )
    await worker.run()
    values = counted.values()
    assert (values["steps"], values["proposed_tokens"], values["accepted_tokens"]) == (4, 17, 9)
