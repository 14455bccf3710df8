from collections.abc import AsyncGenerator, Sequence

from service_kit.delta import Cursor
from service_kit.sampling import FinishReason
from sluice.answer import Answer, read_answer
from sluice.client_events import Accepted, Event, Finished, Output, Reconnecting, TokenLogprob, TopLogprob

ACCEPTED = Accepted(generation_id="g-1", request_id="r-1", is_created=True, state="QUEUED", prompt_tokens=7)
FINISHED = Finished(
    finish_reason=FinishReason.STOP, prompt_tokens=7, cached_prompt_tokens=0, output_tokens=5, matched_stop=None
)


def _output(text: str, count: int) -> Output:
    return Output(token_ids=tuple(range(count)), text=text, cursor=Cursor())


async def _replay(events: Sequence[Event]) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event


async def _read(events: Sequence[Event], times: Sequence[float]) -> tuple[Answer, list[str], list[str]]:
    written: list[str] = []
    notices: list[str] = []
    clock = iter(times)
    answer = await read_answer(_replay(events), write=written.append, notice=notices.append, clock=lambda: next(clock))
    return answer, written, notices


async def test_the_rate_counts_the_tokens_behind_the_first_event_over_the_time_they_took() -> None:
    events = [ACCEPTED, _output("ab", 2), _output("c", 1), _output("de", 2), FINISHED]
    answer, written, notices = await _read(events, [10.0, 10.5, 11.0, 12.0])
    assert written == ["ab", "c", "de"]
    assert notices == []
    assert answer.text == "abcde"
    assert answer.first_token_s == 0.5
    assert answer.tokens_per_s == 2.0
    assert answer.describe() == [
        "generation g-1",
        "7 prompt tokens, 5 output tokens, ended by STOP",
        "first token after 500 ms, then 2.0 tokens/s",
    ]


async def test_an_answer_of_one_event_has_no_rate_and_an_empty_one_no_first_token() -> None:
    one, _, _ = await _read([ACCEPTED, _output("a", 1), FINISHED], [1.0, 1.25])
    empty, _, _ = await _read([ACCEPTED, FINISHED], [1.0])
    assert one.tokens_per_s is None
    assert one.describe()[-1] == "first token after 250 ms"
    assert empty.first_token_s is None
    assert len(empty.describe()) == 2


async def test_a_reconnection_is_told_and_counted_and_stays_out_of_the_text() -> None:
    pause = Reconnecting(failures=1, delay_s=0.5, cause="UNAVAILABLE")
    answer, written, notices = await _read([ACCEPTED, _output("a", 1), pause, _output("b", 1), FINISHED], [0, 1, 2])
    assert "".join(written) == answer.text == "ab"
    assert notices == ["[UNAVAILABLE; continuing in 0.5 s]"]
    assert answer.describe()[-1] == "reconnected 1 times"


def _logprob(token_id: int, token: bytes, logprob: float, *top: tuple[int, bytes, float]) -> TokenLogprob:
    others = tuple(TopLogprob(token_id=each, token=text, logprob=value) for each, text, value in top)
    return TokenLogprob(token_id=token_id, token=token, logprob=logprob, top=others)


async def test_log_probabilities_are_a_line_per_token_in_order_of_the_output() -> None:
    first = _logprob(5, b" Paris", -0.01, (5, b" Paris", -0.01), (6, b"\n", -5.5))
    second, third = _logprob(7, b"\xe2\x82", -2.0), _logprob(2, b"", -0.5)
    outputs = [
        Output(token_ids=(5, 7), text=" Paris", cursor=Cursor(), logprobs=(first, second)),
        Output(token_ids=(2,), text="", cursor=Cursor(), logprobs=(third,)),
    ]
    answer, _, _ = await _read([ACCEPTED, *outputs, FINISHED], [0, 1, 2])
    assert answer.describe_logprobs() == [
        '    1  " Paris"     -0.0100  " Paris" -0.0100  "\\n" -5.5000',
        '    2  "\\xe2\\x82"   -2.0000',
        "    3  <2>          -0.5000",
    ]
    plain, _, _ = await _read([ACCEPTED, _output("a", 1), FINISHED], [0, 1])
    assert plain.describe_logprobs() == []
