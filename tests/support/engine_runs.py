"""Drives an engine in process, without the process border."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpu_worker.engine.port import Engine, SequenceFinish, SequenceSpec, StepOutput
from service_kit.delta import Delta
from service_kit.sampling import SamplingParams

_MAX_STEPS = 5000


@dataclass(kw_only=True)
class Result:
    """What one sequence put out."""

    deltas: list[Delta] = field(default_factory=list)
    finish: SequenceFinish | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.deltas for token_id in delta.token_ids)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def make_spec(
    sequence_id: str,
    prompt: Iterable[int],
    *,
    output: Iterable[int] = (),
    priority: int = 1,
    prefix_salt: str = "",
    **sampling: object,
) -> SequenceSpec:
    """Greedy and to the full length unless told otherwise."""
    fields: dict[str, object] = {"max_output_tokens": 20, "temperature": 0.0, "ignore_eos": True, **sampling}
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        priority=priority,
        nonce=0,
        prefix_salt=prefix_salt,
    )


def collect(results: dict[str, Result], step: StepOutput) -> None:
    """Adds a step's outputs; a delta must continue the one before it, and nothing follows a finish."""
    for output in step.outputs:
        result = results.setdefault(output.sequence_id, Result())
        assert result.finish is None, "output after the last word"
        if output.delta is not None:
            if result.deltas:
                assert output.delta.first == result.deltas[-1].last + 1
                assert output.delta.prev_chain == result.deltas[-1].chain
            result.deltas.append(output.delta)
        result.finish = output.finish


def run_to_end(
    engine: Engine, specs: Iterable[SequenceSpec] = (), *, after_step: Callable[[], None] = lambda: None
) -> dict[str, Result]:
    """Adds `specs` and steps until there is no work; results by sequence id."""
    for spec in specs:
        engine.add(spec)
    results: dict[str, Result] = {}
    for _ in range(_MAX_STEPS):
        if not engine.has_work():
            return results
        collect(results, engine.step())
        after_step()
    raise AssertionError(f"still at work after {_MAX_STEPS} steps")
