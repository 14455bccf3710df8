"""Spans of what happened to an attempt on this worker, made when its end is known. The times are the engine's own."""

from collections.abc import Mapping

from gpu_worker.attempts import AttemptRecord
from gpu_worker.engine.port import LoadReport, SequenceFinish
from service_kit.telemetry import AttributeValue, record_span

_NS_PER_S = 1_000_000_000


def record_attempt(record: AttemptRecord, finish: SequenceFinish, load: LoadReport) -> None:
    """`worker.prefill` (from being added to the first token) and `worker.decode`, children of the attempt's context.
    `load` is the engine's as of the step that ended the attempt.
    """
    times = finish.timings
    common: Mapping[str, AttributeValue] = {
        "generation_id": record.ref.generation_id,
        "attempt": record.ref.attempt,
        "finish_reason": finish.reason.value if finish.reason is not None else "FAILED",
    }
    if times.added:
        attributes = {
            **common,
            "tokens": finish.prompt_tokens + record.num_prior,
            "cached_tokens": finish.cached_prompt_tokens,
            "wait_s": max(times.prefill_started - times.added, 0.0) if times.prefill_started else 0.0,
        }
        _record(record, "worker.prefill", times.added, times.first_token or times.finished, attributes)
    if times.first_token:
        attributes = {
            **common,
            "tokens": finish.output_tokens - record.num_prior,
            "largest_batch": load.largest_batch,
            "kv_waste": load.kv_waste,
        }
        _record(record, "worker.decode", times.first_token, times.finished, attributes)


def _record(
    record: AttemptRecord, name: str, start_s: float, end_s: float, attributes: Mapping[str, AttributeValue]
) -> None:
    record_span(
        name,
        start_unix_ns=int(start_s * _NS_PER_S),
        end_unix_ns=int(max(end_s, start_s) * _NS_PER_S),
        parent=record.traceparent,
        attributes=attributes,
    )
