"""`sluice demo`: the whole service once from end to end, with its proof."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from opentelemetry import trace

from service_kit.telemetry import setup_tracing, tracer
from sluice.answer import Answer
from sluice.client_events import Message, Sampling
from sluice.commands.access import client_settings
from sluice.commands.generate import ask
from sluice.commands.models import DEFAULT_MODEL, DEFAULT_SIMULATED_MODEL, pull_with_bars, require_model
from sluice.commands.up import Engine, start, stop_signals
from sluice.console import say, write_text
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.local.services import Service
from sluice.local.stack import LocalStack, StackSettings
from sluice.timeline import Span, is_connected, read_spans, render_timeline, services_of

QUESTION = "What is the capital of France?"
_EXPECTED = "Paris"
_MAX_TOKENS = 64
_SPANS_TIMEOUT_S = 15.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo saw before the stack was stopped."""

    answer: Answer
    spans: list[Span]


def demo_command(
    engine: Annotated[Engine, typer.Option(help="native or simulated.")] = Engine.NATIVE,
) -> None:
    """Start everything, ask one question, show answer, statistics and trace, stop everything. Exit code 0: all held."""
    home = find_home()
    model = DEFAULT_MODEL if engine is Engine.NATIVE else DEFAULT_SIMULATED_MODEL
    if engine is Engine.NATIVE:
        pull_with_bars(home, model)
    else:
        require_model(home, model, engine=engine.value)
    own_home = Home(root=home.root / "demo")  # beside a stack that may be running in `home`
    settings = StackSettings(home=own_home, models_directory=home.models, models=(model,), engine=engine.value)
    stack = LocalStack(settings, on_line=_only_own_lines)
    with stop_signals() as stop:
        try:
            say("starting Postgres, Valkey, scheduler, worker and gateway")
            started_s = time.monotonic()
            start(stack, own_home, stop)
            if stop.is_set():
                raise UserError("interrupted")
            say(f"ready after {time.monotonic() - started_s:.1f} s\n\n> {QUESTION}")
            outcome = _ask_traced(stack, own_home)
        finally:
            stack.stop()
    _report(outcome, own_home.logs)
    problems = find_problems(outcome, is_real=engine is Engine.NATIVE, running=_still_running(stack))
    if problems:
        raise UserError("the demo failed: " + "; ".join(problems))
    say("all held; everything is stopped")


def find_problems(outcome: Outcome, *, is_real: bool, running: list[str]) -> list[str]:
    """What did not hold; empty when all did."""
    problems = []
    if is_real and _EXPECTED not in outcome.answer.text:
        problems.append(f"the answer does not name {_EXPECTED}")
    if outcome.answer.finished.output_tokens == 0:
        problems.append("there is no output")
    missing = sorted(set(Service) - services_of(outcome.spans))
    if missing:
        problems.append(f"the trace has no span of {', '.join(missing)}")
    elif not is_connected(outcome.spans):
        problems.append("the spans do not form one tree")
    problems += [f"{name} still runs" for name in running]
    return problems


def _ask_traced(stack: LocalStack, home: Home) -> Outcome:
    """One question under a root span of our own, so that its trace id is known."""
    tracing = setup_tracing(service_name="client", trace_dir=home.traces)
    settings = client_settings(home, target=None, api_key=None)
    sampling = Sampling(temperature=0.0, max_output_tokens=_MAX_TOKENS)
    try:
        with tracer().start_as_current_span("ask") as root:
            trace_id = trace.format_trace_id(root.get_span_context().trace_id)
            question = [Message(role="user", content=QUESTION)]
            answer = asyncio.run(ask(settings, stack.model, question, sampling=sampling, priority_class="interactive"))
    finally:
        tracing.shutdown()
    write_text("\n")
    return Outcome(answer=answer, spans=_wait_for_spans(home.traces, trace_id))


def _wait_for_spans(directory: Path, trace_id: str, *, clock: Callable[[], float] = time.monotonic) -> list[Span]:
    """The spans of the trace once all services have written theirs and the tree is whole; at a time-out what there is."""
    deadline = clock() + _SPANS_TIMEOUT_S
    while True:
        spans = read_spans(directory, trace_id)
        if (set(Service) <= services_of(spans) and is_connected(spans)) or clock() > deadline:
            return spans
        time.sleep(_POLL_S)


def _report(outcome: Outcome, logs: Path) -> None:
    say("")
    for line in (*outcome.answer.describe(), "", *render_timeline(outcome.spans), "", f"logs: {logs}"):
        say(line)


def _still_running(stack: LocalStack) -> list[str]:
    servers = {"postgres": stack.postgres.is_running, "valkey": stack.valkey.is_running}
    services = {name: child.is_running for name, child in stack.services.items()}
    return [name for name, is_running in (servers | services).items() if is_running]


def _only_own_lines(name: str, line: str) -> None:
    if name == "sluice":
        say(line)
