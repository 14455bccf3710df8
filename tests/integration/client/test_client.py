from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2_grpc, types_pb2
from service_kit.delta import Cursor
from service_kit.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidArgumentError,
    QuotaExceededError,
    Reason,
    UnavailableError,
)
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import (
    Accepted,
    Event,
    Finished,
    GaveUpError,
    Message,
    Output,
    Reconnecting,
    Sampling,
    StreamBrokenError,
    TokenLogprob,
    TopLogprob,
)
from sluice.retry import RetryPolicy
from sluice.sync_client import SyncSluiceClient
from tests.support.scripted_service import OUTPUT, ScriptedService, Step, cursor_at


class FakeTime:
    """Sleeping moves the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    server = grpc.aio.server()
    servicer = ScriptedService()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def client(service: ScriptedService, time: FakeTime) -> AsyncIterator[SluiceClient]:
    settings = ClientSettings(
        targets=(service.target,),
        api_key="key-1",
        retry=RetryPolicy(
            first_delay=timedelta(seconds=1), max_delay=timedelta(seconds=4), give_up_after=timedelta(seconds=10)
        ),
    )
    async with SluiceClient(settings, sleep=time.sleep, clock=time.clock, draw=lambda: 0.0) as opened:
        yield opened


async def _collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


async def _append_all(seen: list[Event], events: AsyncIterator[Event]) -> None:
    async for event in events:
        seen.append(event)  # noqa: PERF401 - `seen` keeps what came before an error


def _token_ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Output) for token_id in event.token_ids)


async def test_a_stream_yields_accepted_then_numbered_output_then_the_end_with_usage(
    client: SluiceClient, service: ScriptedService
) -> None:
    events = await _collect(
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
    assert _token_ids(events) == OUTPUT
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
    await _collect(client.generate("m", "hi", sampling=wishes))
    await _collect(client.generate("m", "hi"))
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
    events = await _collect(client.generate("m", "hi", sampling=Sampling(logprobs=1)))
    assert [each for event in events if isinstance(event, Output) for each in event.logprobs] == [
        TokenLogprob(
            token_id=token_id,
            token=b"x",
            logprob=-token_id,
            top=(TopLogprob(token_id=token_id + 1, token=b"\xe2", logprob=-0.25),),
        )
        for token_id in OUTPUT
    ]


@pytest.mark.parametrize("position", range(len(OUTPUT) + 1))
async def test_a_stream_cut_at_any_position_continues_at_the_next_token_with_the_same_request_id(
    client: SluiceClient, service: ScriptedService, position: int
) -> None:
    service.steps = [Step(until=position, error=UnavailableError("restarting"))]
    events = await _collect(client.generate("m", "hi"))
    assert _token_ids(events) == OUTPUT
    assert [type(event) for event in events].count(Accepted) == 1
    first, second = service.requests
    assert first.request_id == second.request_id != ""
    assert first.spec == second.spec
    assert Cursor(sequence_number=second.cursor.sequence_number, chain=second.cursor.chain) == cursor_at(position)


@pytest.mark.parametrize(
    "step",
    [
        Step(until=4, is_ending_early=True),
        Step(until=4, bare_code=grpc.StatusCode.CANCELLED),
        Step(until=4, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=0, is_accepting=False, error=UnavailableError("no", reason=Reason.DRAINING)),
    ],
    ids=["ends without a finish reason", "cancelled by the server", "no error info", "refused before acceptance"],
)
async def test_every_way_a_connection_breaks_is_survived(
    client: SluiceClient, service: ScriptedService, step: Step
) -> None:
    service.steps = [step]
    events = await _collect(client.generate("m", "hi"))
    assert _token_ids(events) == OUTPUT
    assert any(isinstance(event, Reconnecting) for event in events)


async def test_a_killed_server_is_survived_by_the_next_gateway(service: ScriptedService, time: FakeTime) -> None:
    dying = grpc.aio.server()
    servicer = ScriptedService(steps=[Step(until=8, is_hanging=True)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, dying)
    target = f"127.0.0.1:{dying.add_insecure_port('127.0.0.1:0')}"
    await dying.start()
    settings = ClientSettings(targets=(target, service.target), api_key="k")
    async with SluiceClient(settings, sleep=time.sleep, clock=time.clock) as client:
        events = []
        async for event in client.generate("m", "hi"):
            events.append(event)
            if isinstance(event, Output) and event.cursor.sequence_number == 3:
                await dying.stop(None)
    assert _token_ids(events) == OUTPUT
    assert len(service.requests) == 1


async def test_the_delay_honours_retry_info_and_grows_otherwise(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    busy = UnavailableError("full", reason=Reason.QUEUE_FULL, retry_after=timedelta(seconds=2.5))
    service.steps = [
        Step(until=0, is_accepting=False, error=busy),
        Step(until=0, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=0, bare_code=grpc.StatusCode.UNAVAILABLE),
        Step(until=3, bare_code=grpc.StatusCode.UNAVAILABLE),
    ]
    await _collect(client.generate("m", "hi"))
    # RetryInfo as it stands (jitter 0); then half of 2 and of 4; output starts the series again.
    assert time.sleeps == [2.5, 1.0, 2.0, 0.5]


async def test_it_gives_up_after_the_stated_time_and_says_how_to_continue(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    service.steps = [Step(until=5, bare_code=grpc.StatusCode.UNAVAILABLE)]
    service.steps += [Step(until=5, error=UnavailableError("down", reason=Reason.STORE_UNAVAILABLE))] * 30
    with pytest.raises(GaveUpError) as caught:
        await _collect(client.generate("m", "hi", request_id="r-9"))
    assert 5.0 <= time.now_s <= 10.0
    assert caught.value.reason == Reason.STORE_UNAVAILABLE
    assert (caught.value.request_id, caught.value.cursor) == ("r-9", cursor_at(5))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidArgumentError("spec.sampling.top_p", "must be above 0"), InvalidArgumentError),
        (AlreadyExistsError("other arguments"), AlreadyExistsError),
        (QuotaExceededError("too many", subject="concurrency"), QuotaExceededError),
        (DataLossError("contradicted"), DataLossError),
    ],
)
async def test_an_answer_that_repeating_cannot_change_is_raised_at_once_with_its_details(
    client: SluiceClient, service: ScriptedService, error: Any, expected: type[Exception]
) -> None:
    service.steps = [Step(until=0, is_accepting=False, error=error)]
    with pytest.raises(expected) as caught:
        await _collect(client.generate("m", "hi"))
    assert caught.value.reason == error.reason
    assert getattr(caught.value, "violations", ()) == getattr(error, "violations", ())
    assert len(service.requests) == 1


def _skip_a_number(delta: types_pb2.Delta) -> None:
    delta.first_sequence_number += 1


def _change_a_token(delta: types_pb2.Delta) -> None:
    delta.token_ids[0] += 1


def _repeat_a_number(delta: types_pb2.Delta) -> None:
    delta.first_sequence_number = 1


def _leave_out_a_log_probability(delta: types_pb2.Delta) -> None:
    delta.logprobs.extend([types_pb2.TokenLogprob()] * (len(delta.token_ids) - 1))


@pytest.mark.parametrize("tamper", [_skip_a_number, _change_a_token, _leave_out_a_log_probability])
async def test_output_that_does_not_continue_what_was_shown_is_never_passed_on(
    client: SluiceClient, service: ScriptedService, tamper: Any
) -> None:
    service.steps = [Step(until=6, bare_code=grpc.StatusCode.UNAVAILABLE), Step(tamper=tamper)]
    seen: list[Event] = []
    with pytest.raises(StreamBrokenError):
        await _append_all(seen, client.generate("m", "hi"))
    assert _token_ids(seen) == OUTPUT[:6]


async def test_tokens_that_were_shown_already_are_refused_when_they_come_again(
    client: SluiceClient, service: ScriptedService
) -> None:
    service.steps = [Step(tamper=_repeat_a_number)]
    with pytest.raises(StreamBrokenError, match="expected token 4 next, the server sent 1"):
        await _collect(client.generate("m", "hi"))


async def test_a_known_generation_is_continued_from_a_cursor(client: SluiceClient, service: ScriptedService) -> None:
    service.steps = [Step(until=12, bare_code=grpc.StatusCode.UNAVAILABLE)]
    events = await _collect(client.stream(generation_id="g-1", cursor=cursor_at(9)))
    assert _token_ids(events) == OUTPUT[9:]
    assert [request.cursor.sequence_number for request in service.requests] == [9, 12]
    with pytest.raises(ValueError, match="generation_id or by request_id"):
        await _collect(client.stream())


async def test_a_unary_call_is_repeated_until_the_service_is_back(
    client: SluiceClient, service: ScriptedService, time: FakeTime
) -> None:
    service.steps = [Step(bare_code=grpc.StatusCode.UNAVAILABLE), Step(error=UnavailableError("down"))]
    assert await client.cancel(generation_id="g-1") == "CANCELLED"
    assert len(service.requests) == 3
    assert len(time.sleeps) == 2


async def test_an_empty_input_and_an_unknown_class_are_refused_by_field_before_any_call(
    client: SluiceClient, service: ScriptedService
) -> None:
    with pytest.raises(InvalidArgumentError, match="input"):
        await _collect(client.generate("m", []))
    with pytest.raises(InvalidArgumentError, match="priority_class"):
        await _collect(client.generate("m", "hi", priority_class="urgent"))
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
    assert _token_ids(events) == OUTPUT
    assert isinstance(events[-1], Finished)
    assert list(service.requests[-1].spec.token_ids.ids) == [5, 6, 7]
