"""The whole output of a generation, from the two places it lives in: chunk rows in Postgres, then the delta log. Pure."""

from service_kit.delta import ChainMismatchError, Delta, join, rest_after
from state_store.delta_log.port import LogView


class BrokenOutputError(Exception):
    """Chunk rows and log do not make one output: there is a hole between them, or their chains differ."""


def combine(stored: Delta | None, view: LogView) -> Delta | None:
    """Chunk rows continued by the log (read from its base); None when there is no output.

    Where both hold a token the chains must agree. A log that ends before the chunk rows do (it lost its tail) adds nothing.
    """
    logged = join(view.deltas)
    if stored is None:
        if logged is not None and logged.first != 1:
            raise BrokenOutputError(f"the log begins at {logged.first} and nothing is stored before it")
        return logged
    if logged is None or logged.last <= stored.last:
        return stored
    if logged.first > stored.last + 1:
        raise BrokenOutputError(f"nothing holds tokens {stored.last + 1} to {logged.first - 1}")
    try:
        rest = rest_after(stored.end, logged)
    except ChainMismatchError as error:
        raise BrokenOutputError(f"log and chunk rows differ: {error}") from error
    return stored if rest is None else join((stored, rest))
