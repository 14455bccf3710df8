"""Streams one generation to the terminal and measures it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from service_kit.errors import SluiceError
from sluice.client import SluiceClient
from sluice.client_events import Accepted, Event, Finished, Output, Reconnecting, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished generation as its reader saw it. `tokens_per_s` is the rate behind the first token; None for one event."""

    generation_id: str
    request_id: str
    text: str
    finished: Finished
    first_token_s: float | None
    tokens_per_s: float | None
    num_reconnects: int
    logprobs: tuple[TokenLogprob, ...] = ()

    def describe(self) -> list[str]:
        """The statistics, for people."""
        end = self.finished
        cached = f" ({end.cached_prompt_tokens} from the prefix cache)" if end.cached_prompt_tokens else ""
        lines = [
            f"generation {self.generation_id}",
            f"{end.prompt_tokens} prompt tokens{cached}, {end.output_tokens} output tokens, ended by {end.finish_reason}",
        ]
        if self.first_token_s is not None:
            rate = "" if self.tokens_per_s is None else f", then {self.tokens_per_s:.1f} tokens/s"
            lines.append(f"first token after {self.first_token_s * 1000:.0f} ms{rate}")
        if self.num_reconnects:
            lines.append(f"reconnected {self.num_reconnects} times")
        return lines

    def describe_logprobs(self) -> list[str]:
        """One line per output token, for people: its number, its text, its log probability, and the most probable ones."""
        width = max((len(_shown(each.token, each.token_id)) for each in self.logprobs), default=0)
        return [
            f"{number:>5}  {_shown(each.token, each.token_id):<{width}} {each.logprob:>9.4f}"
            + "".join(f"  {_shown(other.token, other.token_id)} {other.logprob:.4f}" for other in each.top)
            for number, each in enumerate(self.logprobs, 1)
        ]


async def read_answer(
    events: AsyncGenerator[Event, None],
    *,
    write: Callable[[str], None],
    notice: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Write the text as it comes; returns once the output is complete. Raises SluiceError."""
    started_s = clock()
    accepted: Accepted | None = None
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    arrivals: list[tuple[float, int]] = []
    num_reconnects = 0
    async for event in events:
        match event:
            case Accepted():
                accepted = event
            case Output():
                arrivals.append((clock(), len(event.token_ids)))
                texts.append(event.text)
                logprobs += event.logprobs
                write(event.text)
            case Reconnecting():
                num_reconnects += 1
                notice(f"[{event.cause}; continuing in {event.delay_s:.1f} s]")
            case Finished():
                assert accepted is not None
                return Answer(
                    generation_id=accepted.generation_id,
                    request_id=accepted.request_id,
                    text="".join(texts),
                    finished=event,
                    first_token_s=arrivals[0][0] - started_s if arrivals else None,
                    tokens_per_s=_rate(arrivals),
                    num_reconnects=num_reconnects,
                    logprobs=tuple(logprobs),
                )
    raise AssertionError("a stream of the client ends with Finished or an error")


async def read_or_cancel(
    client: SluiceClient,
    events: AsyncGenerator[Event, None],
    request_id: str,
    *,
    write: Callable[[str], None],
    notice: Callable[[str], None],
) -> Answer:
    """As `read_answer`; when the reader is interrupted (Ctrl-C), the generation is cancelled too."""
    try:
        async with contextlib.aclosing(events):
            return await read_answer(events, write=write, notice=notice)
    except asyncio.CancelledError:
        with contextlib.suppress(SluiceError, TimeoutError):
            async with asyncio.timeout(2):
                await client.cancel(request_id=request_id)
        raise


def _shown(token: bytes, token_id: int) -> str:
    """A token in quotes; what cannot be printed as its escape, a special token as its id."""
    if not token:
        return f"<{token_id}>"
    text = token.decode(errors="backslashreplace")
    return '"' + "".join(each if each.isprintable() else repr(each)[1:-1] for each in text) + '"'


def _rate(arrivals: list[tuple[float, int]]) -> float | None:
    """Tokens per second behind the first event."""
    if len(arrivals) < 2:  # noqa: PLR2004 - a rate needs two moments
        return None
    duration_s = arrivals[-1][0] - arrivals[0][0]
    return sum(count for _, count in arrivals[1:]) / duration_s if duration_s > 0 else None
