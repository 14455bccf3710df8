"""What the simulated engine must have said, recomputed from the nonces of the attempts. Pure.

In token mode `nonce` a token depends on everything before it and on the nonce of the attempt that made it, so each position
tells which attempt it came from. The attempts table says which attempt made which positions; both must agree. A mixture of
two attempts, even one with a consistent chain, does not.
"""

from collections.abc import Sequence

from gpu_worker.engine.simulated_tokens import context_hash, simulated_token
from service_kit.delta import extend_chain
from tests.chaos.oracle import Execution, Predictions


def simulated_predictions() -> Predictions:
    return Predictions(tokens=check_tokens, text=check_text)


def check_tokens(execution: Execution, token_ids: Sequence[int], can_lose_output: bool) -> str | None:
    """Every token belongs to the attempt that the table names for its position. Where an attempt's end is not recorded, or
    the log lost output, the attempts must at least follow each other in order. An output that was stopped would have gone
    on with the stop string, of the last attempt, which is not part of it."""
    row = execution.row
    ends = {attempt.attempt: attempt.end_position for attempt in execution.attempts}
    context = context_hash(row.prompt_token_ids, ())
    earliest = 0
    for position, token_id in enumerate(token_ids, start=1):
        makers = _makers(execution, context, token_id)
        fitting = [
            attempt for attempt in makers if attempt >= earliest and (can_lose_output or _made(ends, attempt, position))
        ]
        if not fitting:
            return (
                f"token {position} of {len(token_ids)} is not of the attempt that made this position: it fits"
                f" {makers or 'none'}; recorded ends {ends}"
            )
        earliest = min(fitting)
        context = extend_chain(context, [token_id])
    stop = execution.wish.stop
    if row.finish_reason == "STOP" and stop and row.attempt not in _makers(execution, context, ord(stop)):
        return f"ended by STOP after {len(token_ids)} tokens, where attempt {row.attempt} says something else"
    return None


def _makers(execution: Execution, context: int, token_id: int) -> list[int]:
    """The attempts that would say this token next."""
    return [
        attempt.attempt
        for attempt in execution.attempts
        if simulated_token(context, seed=execution.row.seed, nonce=attempt.nonce) == token_id
    ]


def _made(ends: dict[int, int | None], attempt: int, position: int) -> bool:
    """Whether the recorded ends allow that `attempt` made `position`."""
    begins = max((end for number, end in ends.items() if number < attempt and end is not None), default=0)
    end = ends[attempt]
    return position > begins and (end is None or position <= end)


def check_text(execution: Execution, token_ids: Sequence[int], text: str) -> str | None:
    """A simulated token is one printable character; the stop string, of one character, never is part of the output."""
    stop, reason = execution.wish.stop, execution.row.finish_reason
    whole = "".join(map(chr, token_ids))
    if reason == "STOP" and stop is None:
        return "ended by STOP without a stop string"
    if stop is not None and stop in whole:
        return f"went on behind the stop string and ended by {reason}"
    return None if text == whole else f"the stored text ({len(text)} characters) is not that of the ids ({len(whole)})"
