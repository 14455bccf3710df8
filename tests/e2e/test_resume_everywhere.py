"""A stream cut after any token continues with exactly the ids and the text of the uncut one."""

from collections.abc import AsyncIterator, Iterator

import pytest

from service_kit.delta import Cursor
from sluice.client import SluiceClient
from sluice.client_events import Output, Sampling
from sluice.local.services import Service
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, running_stack

NUM_TOKENS = 40
TEXT = "한국어 👩‍👩‍👧‍👦 né 🏳️‍🌈 e\u0301"
"""More than 40 bytes, so 40 tokens of a byte-level model; most characters are cut by tokens, the last one stays open."""


@pytest.fixture(scope="module")
def echo_stack() -> Iterator[RunningStack]:
    """Says the prompt back, byte by byte, slowly enough to be cut anywhere."""
    with running_stack(tokens_per_s=100, counts={Service.GATEWAY: 2}, engine_settings={"token_mode": "echo"}) as stack:
        yield stack


@pytest.fixture
async def client(echo_stack: RunningStack) -> AsyncIterator[SluiceClient]:
    await echo_stack.heal()
    async with echo_stack.client() as client:
        yield client


def _sampling() -> Sampling:
    return Sampling(max_output_tokens=NUM_TOKENS)


async def _cut(client: SluiceClient, generation_id: str, num_tokens: int) -> tuple[list[int], str, Cursor]:
    """The first tokens of a live stream, as a client has them that is cut off there."""
    token_ids: list[int] = []
    text, cursor = "", Cursor()
    if num_tokens == 0:
        return token_ids, text, cursor
    events = client.stream(generation_id=generation_id)
    async for event in events:
        if isinstance(event, Output):
            token_ids += event.token_ids
            text += event.text
            cursor = event.cursor
            if len(token_ids) >= num_tokens:
                break
    await events.aclose()
    return token_ids, text, cursor


def _expected_text() -> str:
    return TEXT.encode()[:NUM_TOKENS].decode(errors="ignore")


async def _uncut(client: SluiceClient, generation_id: str) -> Reader:
    reader = Reader(client.stream(generation_id=generation_id))
    await reader.until_end()
    return reader


async def test_cut_live_after_every_token_and_resumed_the_output_is_the_uncut_one(client: SluiceClient) -> None:
    seen_cuts = set()
    for num_tokens in range(NUM_TOKENS + 1):
        accepted = await client.create(MODEL, TEXT, sampling=_sampling())
        token_ids, text, cursor = await _cut(client, accepted.generation_id, num_tokens)
        seen_cuts.add(len(token_ids))
        rest = Reader(client.stream(generation_id=accepted.generation_id, cursor=cursor))
        await rest.until_end()
        assert (*token_ids, *rest.token_ids) == tuple(TEXT.encode()[:NUM_TOKENS])
        assert text + rest.text == _expected_text()
    # One token per delta at this speed, so nearly every position was really cut.
    assert len(seen_cuts) > NUM_TOKENS / 2


async def test_resumed_after_the_end_at_every_token_through_either_gateway_the_rest_is_the_same(
    echo_stack: RunningStack, client: SluiceClient
) -> None:
    accepted = await client.create(MODEL, TEXT, sampling=_sampling())
    cursors = [Cursor()]
    texts = [""]
    async for event in client.stream(generation_id=accepted.generation_id):
        if isinstance(event, Output) and len(event.token_ids) == 1:
            cursors.append(event.cursor)
            texts.append(texts[-1] + event.text)
    uncut = await _uncut(client, accepted.generation_id)
    assert uncut.token_ids == tuple(TEXT.encode()[:NUM_TOKENS])
    assert uncut.text == _expected_text()
    for gateway in echo_stack.local.gateways:
        async with echo_stack.client(targets=(gateway,)) as one:
            for cursor, text in zip(cursors, texts, strict=True):
                rest = Reader(one.stream(generation_id=accepted.generation_id, cursor=cursor))
                await rest.until_end()
                assert rest.token_ids == uncut.token_ids[cursor.sequence_number :]
                assert text + rest.text == uncut.text


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 20, 39])
async def test_cut_by_a_killed_gateway_and_resumed_through_the_restarted_one_the_output_is_the_uncut_one(
    echo_stack: RunningStack, num_tokens: int
) -> None:
    await echo_stack.heal()
    async with echo_stack.client(targets=(echo_stack.local.gateways[0],)) as client:
        accepted = await client.create(MODEL, TEXT, sampling=_sampling())
        token_ids, text, cursor = await _cut(client, accepted.generation_id, num_tokens)
        echo_stack.kill("gateway")
        echo_stack.local.start_service("gateway")
        rest = Reader(client.stream(generation_id=accepted.generation_id, cursor=cursor))
        await rest.until_end()
    assert (*token_ids, *rest.token_ids) == tuple(TEXT.encode()[:NUM_TOKENS])
    assert text + rest.text == _expected_text()
