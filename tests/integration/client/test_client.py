"""What the client sends and yields."""

from datetime import timedelta

import grpc
import pytest

from inference.v1 import types_pb2
from service_kit.errors import (
    InvalidArgumentError,
)
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import (
    Accepted,
    Event,
    Finished,
    Message,
    Output,
    Sampling,
    TokenLogprob,
    TopLogprob,
)
from sluice.sync_client import SyncSluiceClient
from tests.integration.client.steps import collect, output_ids
from tests.support.scripted_service import OUTPUT, ScriptedService, Step, cursor_at


async def test_a_stream_yields_accepted_then_numbered_output_then_the_end_with_usage(
    client: SluiceClient, service: ScriptedService
) -> None:
    events = await collect(
        client.generate(
            "m",
            [Message(role="user", content="hello")],
            sampling=Sampling(temperature=0.0, max_output_tokens=20, stop=("END",)),
            request_id="r-1",
            priority_class="interactive",
            grace=timedelta(seconds=3),
        )
    )
    assert events[0] == Accepted(
        generation_id="g-1", request_id="r-1", is_created=True, state="RUNNING", prompt_tokens=7
    )
    assert output_ids(events) == OUTPUT
    assert events[-2].cursor == cursor_at(len(OUTPUT))
    assert events[-1] == Finished(
        finish_reason="STOP", prompt_tokens=7, cached_prompt_tokens=2, output_tokens=20, matched_stop="END"
    )
    (request,) = service.requests
    assert request.spec.chat.messages[0].content == "hello"
    assert request.spec.sampling.HasField("temperature")
    assert request.spec.sampling.temperature == 0.0
    assert not request.spec.sampling.HasField("top_p")
    assert request.spec.priority_class == types_pb2.PRIORITY_CLASS_INTERACTIVE
    assert request.delivery.grace.seconds == 3
    assert not request.delivery.HasField("deadline")
    assert not request.HasField("cursor")
    assert service.metadata[0]["authorization"] == "Bearer key-1"


async def test_every_wish_reaches_the_service_and_what_is_not_wished_is_left_out(
    client: SluiceClient, service: ScriptedService
) -> None:
    wishes = Sampling(
        min_output_tokens=0,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={7: -100, 3: 0.5},
        include_stop=True,
        logprobs=0,
    )
    await collect(client.generate("m", "hi", sampling=wishes))
    await collect(client.generate("m", "hi"))
    wished, unset = (request.spec.sampling for request in service.requests)
    assert wished == types_pb2.Sampling(
        min_output_tokens=0,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=[types_pb2.LogitBias(token_id=7, bias=-100), types_pb2.LogitBias(token_id=3, bias=0.5)],
        include_stop=True,
        logprobs=0,
    )
    assert unset == types_pb2.Sampling()


async def test_log_probabilities_come_with_their_tokens(client: SluiceClient, service: ScriptedService) -> None:
    def add_logprobs(delta: types_pb2.Delta) -> None:
        for token_id in delta.token_ids:
            top = types_pb2.TopLogprob(token_id=token_id + 1, logprob=-0.25, token=b"\xe2")
            delta.logprobs.add(logprob=-token_id, token=b"x", top=[top])

    service.steps = [Step(tamper=add_logprobs)]
    events = await collect(client.generate("m", "hi", sampling=Sampling(logprobs=1)))
    assert [each for event in events if isinstance(event, Output) for each in event.logprobs] == [
        TokenLogprob(
            token_id=token_id,
            token=b"x",
            logprob=-token_id,
            top=(TopLogprob(token_id=token_id + 1, token=b"\xe2", logprob=-0.25),),
        )
        for token_id in OUTPUT
    ]


async def test_a_known_generation_is_continued_from_a_cursor(client: SluiceClient, service: ScriptedService) -> None:
    service.steps = [Step(until=12, bare_code=grpc.StatusCode.UNAVAILABLE)]
    events = await collect(client.stream(generation_id="g-1", cursor=cursor_at(9)))
    assert output_ids(events) == OUTPUT[9:]
    assert [request.cursor.sequence_number for request in service.requests] == [9, 12]
    with pytest.raises(ValueError, match="generation_id or by request_id"):
        await collect(client.stream())


async def test_an_empty_input_and_an_unknown_class_are_refused_by_field_before_any_call(
    client: SluiceClient, service: ScriptedService
) -> None:
    with pytest.raises(InvalidArgumentError, match="input"):
        await collect(client.generate("m", []))
    with pytest.raises(InvalidArgumentError, match="priority_class"):
        await collect(client.generate("m", "hi", priority_class="urgent"))
    assert service.requests == []


def _use_blocking(target: str) -> list[Event]:
    with SyncSluiceClient(ClientSettings(targets=(target,), api_key="k")) as client:
        partial = client.generate("m", "hi")
        assert isinstance(next(partial), Accepted)
        partial.close()
        assert client.cancel(request_id="r-1") == "CANCELLED"
        events = list(client.generate("m", [5, 6, 7]))
    client.close()
    return events


async def test_the_blocking_client_streams_the_same_events(service: ScriptedService) -> None:
    import asyncio  # noqa: PLC0415 - only this test leaves the loop

    service.steps = [Step(), Step(), Step(until=4, bare_code=grpc.StatusCode.UNAVAILABLE)]
    events = await asyncio.to_thread(_use_blocking, service.target)
    assert output_ids(events) == OUTPUT
    assert isinstance(events[-1], Finished)
    assert list(service.requests[-1].spec.token_ids.ids) == [5, 6, 7]
