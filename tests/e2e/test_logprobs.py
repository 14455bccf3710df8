"""Log probabilities stay with their tokens, wherever the output is read from."""

from redis import Redis

from service_kit.delta import Cursor, extend_chain
from sluice.client import SluiceClient
from sluice.client_codec import logprobs_from_proto
from sluice.client_events import Output, Sampling, TokenLogprob, TopLogprob
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, simulated_output

NUM_TOKENS = 60
PROMPT = "probably"
SAMPLING = Sampling(max_output_tokens=NUM_TOKENS, seed=3, logprobs=2, repetition_penalty=1.1, logit_bias={5: 0.5})


def _expected() -> tuple[TokenLogprob, ...]:
    """The simulated engine is certain of every token, so the most probable one tells which token the values belong to."""
    return tuple(
        TokenLogprob(
            token_id=token_id,
            token=bytes([token_id]),
            logprob=0.0,
            top=(TopLogprob(token_id=token_id, token=bytes([token_id]), logprob=0.0),),
        )
        for token_id in simulated_output(PROMPT, seed=3, count=NUM_TOKENS)
    )


def _assert_complete(reader: Reader, *, behind: int = 0) -> None:
    expected = _expected()[behind:]
    assert reader.token_ids == tuple(each.token_id for each in expected)
    assert reader.text == b"".join(each.token for each in expected).decode()
    assert reader.logprobs == expected
    outputs = [event for event in reader.events if isinstance(event, Output)]
    assert [len(event.logprobs) for event in outputs] == [len(event.token_ids) for event in outputs]


def _cursor_at(position: int) -> Cursor:
    chain = extend_chain(0, simulated_output(PROMPT, seed=3, count=position))
    return Cursor(sequence_number=position, chain=chain)


async def _assert_rest(client: SluiceClient, generation_id: str, position: int) -> None:
    rest = Reader(client.stream(generation_id=generation_id, cursor=_cursor_at(position)))
    await rest.until_end()
    _assert_complete(rest, behind=position)


async def _assert_record(client: SluiceClient, generation_id: str) -> None:
    record = await client.get(generation_id=generation_id)
    assert logprobs_from_proto(record.token_ids, record.logprobs) == _expected()


def _forget_log(stack: RunningStack, generation_id: str) -> None:
    with Redis.from_url(stack.local.valkey.url) as redis:
        assert redis.delete(*redis.keys(f"log:*:{generation_id}*"))


async def test_log_probabilities_survive_a_lost_worker_every_resume_and_the_end_of_the_log(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, PROMPT, sampling=SAMPLING))
        await reader.until_token(20)
        generation_id = reader.accepted.generation_id
        seen = reader.cursor.sequence_number
        second = Reader(client.stream(generation_id=generation_id, cursor=_cursor_at(seen)))
        stack.kill(await stack.session_of(generation_id))
        await reader.until_end()
        await second.until_end()
        _assert_complete(reader)
        _assert_complete(second, behind=seen)
        assert stack.generation(generation_id)["attempt"] == 2
        for position in range(NUM_TOKENS + 1):
            await _assert_rest(client, generation_id, position)
        await _assert_record(client, generation_id)
        _forget_log(stack, generation_id)
        for position in (0, 1, seen, NUM_TOKENS - 1, NUM_TOKENS):
            await _assert_rest(client, generation_id, position)
        await _assert_record(client, generation_id)
    chunks = stack.row(
        "SELECT count(*) AS rows, count(logprobs) AS with_logprobs FROM chunks WHERE generation_id = %s", generation_id
    )
    assert chunks is not None
    assert chunks["rows"] == chunks["with_logprobs"] > 1


async def test_a_request_without_log_probabilities_has_none_anywhere(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, PROMPT, sampling=Sampling(max_output_tokens=5, seed=3)))
        await reader.until_end()
        record = await client.get(generation_id=reader.accepted.generation_id)
    assert (len(reader.token_ids), reader.logprobs, list(record.logprobs)) == (5, (), [])
    assert stack.row("SELECT logprobs FROM chunks WHERE generation_id = %s", reader.accepted.generation_id) == {
        "logprobs": None
    }
