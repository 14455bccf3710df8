from dataclasses import replace
from typing import Any

import pytest

from gateway.app import GatewayApp
from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID, VOCAB_SIZE
from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import EMPTY_CHAIN, TokenLogprob, extend_chain
from service_kit.grpc_server import GrpcServer
from service_kit.ids import GatewayId, GenerationId
from state_store.model import State
from state_store.quota.port import PermissiveQuota
from tests.support.gateway import GatewayRig


async def create(gateway: GatewayRig, request_id: str = "", **spec: Any) -> types_pb2.Accepted:
    request = inference_pb2.CreateGenerationRequest(
        request_id=request_id, spec=types_pb2.GenerationSpec(**{"model": "simulated", "prompt": "ab", **spec})
    )
    response = await gateway.stub.CreateGeneration(request, metadata=gateway.auth, timeout=20)
    accepted: types_pb2.Accepted = response.accepted
    return accepted


async def get(gateway: GatewayRig, **ref: str) -> types_pb2.Generation:
    request = inference_pb2.GetGenerationRequest(generation=inference_pb2.GenerationRef(**ref))
    response = await gateway.stub.GetGeneration(request, metadata=gateway.auth, timeout=20)
    generation: types_pb2.Generation = response.generation
    return generation


async def test_a_queued_generation_is_shown_as_it_stands(gateway: GatewayRig) -> None:
    accepted = await create(gateway, "r1", sampling=types_pb2.Sampling(seed=11))
    shown = await get(gateway, request_id="r1")
    assert shown.generation_id == accepted.generation_id
    assert (shown.state, shown.is_final, shown.attempts) == (types_pb2.GENERATION_STATE_QUEUED, False, 0)
    assert (shown.model, shown.precision, shown.seed) == ("simulated", "sim", 11)
    assert shown.priority_class == types_pb2.PRIORITY_CLASS_STANDARD
    assert shown.usage == types_pb2.Usage(prompt_tokens=3)
    assert shown.HasField("create_time")
    assert not shown.HasField("start_time")
    assert not shown.HasField("cursor")


async def test_a_live_generation_shows_the_end_of_the_log_and_says_so(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway)).generation_id)
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, "hello")
    shown = await get(gateway, generation_id=generation_id)
    assert (shown.state, shown.is_final, shown.attempts) == (types_pb2.GENERATION_STATE_RUNNING, False, 1)
    assert (shown.text, list(shown.token_ids)) == ("hello", list(b"hello"))
    assert shown.cursor == types_pb2.Cursor(sequence_number=5, chain=extend_chain(EMPTY_CHAIN, b"hello"))
    assert shown.usage.output_tokens == 5


async def test_a_live_generation_whose_log_was_lost_shows_what_is_stored(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway)).generation_id)
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, "hello")
    await gateway.scheduler.store_and_lose_log(generation_id)
    assert (await get(gateway, generation_id=generation_id)).text == "hello"
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, " world")
    assert (await get(gateway, generation_id=generation_id)).text == "hello world"


async def test_a_finished_generation_is_read_from_the_store(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway)).generation_id)
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, "hello")
    await gateway.scheduler.finish(generation_id)
    gateway.scheduler.log.lose_all()
    shown = await get(gateway, generation_id=generation_id)
    assert (shown.state, shown.is_final, shown.text) == (types_pb2.GENERATION_STATE_SUCCEEDED, True, "hello")
    assert shown.finish_reason == types_pb2.FINISH_REASON_STOP
    assert shown.HasField("end_time")
    assert not shown.HasField("error")


async def test_the_record_has_the_log_probabilities_of_its_tokens(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway, sampling=types_pb2.Sampling(logprobs=2))).generation_id)
    await gateway.scheduler.grant(generation_id)
    for token_id in b"hel":
        logprobs = [TokenLogprob(-token_id / 4, ((token_id, -token_id / 4), (1, -50.0)))]
        await gateway.scheduler.produce(generation_id, [token_id], [chr(token_id)], logprobs)
    live = await get(gateway, generation_id=generation_id)
    await gateway.scheduler.finish(generation_id)
    gateway.scheduler.log.lose_all()
    final = await get(gateway, generation_id=generation_id)
    assert (live.is_final, final.is_final) == (False, True)
    assert list(live.logprobs) == list(final.logprobs)
    assert [each.logprob for each in final.logprobs] == [-token_id / 4 for token_id in final.token_ids]
    assert [each.token for each in final.logprobs] == [b"h", b"e", b"l"]
    assert [[(top.token_id, top.logprob, top.token) for top in each.top] for each in final.logprobs] == [
        [(token_id, -token_id / 4, bytes([token_id])), (1, -50.0, b"\x01")] for token_id in b"hel"
    ]


async def test_a_failed_generation_has_its_reason(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway)).generation_id)
    await gateway.scheduler.finish(generation_id, State.EXPIRED, error_reason="QUEUE_TIMEOUT")
    shown = await get(gateway, generation_id=generation_id)
    assert (shown.state, shown.error.reason) == (types_pb2.GENERATION_STATE_EXPIRED, "QUEUE_TIMEOUT")


async def test_generations_are_listed_newest_first_page_by_page(gateway: GatewayRig) -> None:
    ids = [(await create(gateway, f"r{index}")).generation_id for index in range(5)]
    listed: list[str] = []
    token = ""
    num_pages = 0
    while True:
        request = inference_pb2.ListGenerationsRequest(page_size=2, page_token=token)
        page = await gateway.stub.ListGenerations(request, metadata=gateway.auth)
        listed += [generation.generation_id for generation in page.generations]
        assert all(not generation.text for generation in page.generations)
        num_pages += 1
        token = page.next_page_token
        if not token:
            break
    assert listed == ids[::-1]
    assert num_pages == 3


async def test_a_list_can_be_limited_to_states(gateway: GatewayRig) -> None:
    ended = GenerationId((await create(gateway, "r1")).generation_id)
    await create(gateway, "r2")
    await gateway.scheduler.finish(ended, State.CANCELLED)
    request = inference_pb2.ListGenerationsRequest(states=[types_pb2.GENERATION_STATE_CANCELLED])
    page = await gateway.stub.ListGenerations(request, metadata=gateway.auth)
    assert [generation.generation_id for generation in page.generations] == [ended]


async def test_cancelling_is_idempotent_and_leaves_an_ended_one_as_it_is(gateway: GatewayRig) -> None:
    generation_id = GenerationId((await create(gateway, "r1")).generation_id)
    request = inference_pb2.CancelGenerationRequest(generation=inference_pb2.GenerationRef(request_id="r1"))
    for _ in range(2):
        answer = await gateway.stub.CancelGeneration(request, metadata=gateway.auth)
        assert (answer.state, answer.generation_id) == (types_pb2.GENERATION_STATE_CANCELLED, generation_id)


async def test_models_are_listed_with_their_live_workers(gateway: GatewayRig) -> None:
    request = inference_pb2.ListModelsRequest()
    (model,) = (await gateway.stub.ListModels(request, metadata=gateway.auth)).models
    assert (model.model, model.precision, model.context_length, model.vocab_size, model.workers) == (
        "simulated",
        "sim",
        64,
        VOCAB_SIZE,
        0,
    )
    await gateway.scheduler.grant(GenerationId((await create(gateway)).generation_id))
    (model,) = (await gateway.stub.ListModels(request, metadata=gateway.auth)).models
    assert model.workers == 1


async def test_tokenize_answers_what_generate_would_use(gateway: GatewayRig) -> None:
    answer = await gateway.stub.Tokenize(
        inference_pb2.TokenizeRequest(model="simulated", prompt="ab"), metadata=gateway.auth
    )
    assert (list(answer.token_ids), answer.context_length) == ([BOS_TOKEN_ID, *b"ab"], 64)
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="hi")])
    answer = await gateway.stub.Tokenize(
        inference_pb2.TokenizeRequest(model="simulated", chat=chat), metadata=gateway.auth
    )
    assert list(answer.token_ids) == [BOS_TOKEN_ID, *b"user: hi\nassistant: "]
    await create(gateway, prompt=None, chat=chat)
    assert list(gateway.scheduler.submits[-1].prompt_token_ids) == list(answer.token_ids)


async def test_a_gateway_knows_its_models_before_it_listens(
    gateway: GatewayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that comes back early must not hear that its model does not exist."""
    store = gateway.scheduler.store
    app = GatewayApp(
        replace(gateway.config, listen="127.0.0.1:0"),
        gateway_id=GatewayId("another"),
        generations=store,
        sessions=store,
        keys=store,
        log=gateway.scheduler.log,
        quota=PermissiveQuota(),
    )
    known_at_start: list[str] = []
    listen = GrpcServer.start

    async def note_and_listen(server: GrpcServer) -> int:
        known_at_start.extend(model.manifest.model for model in app.registry.models())
        return await listen(server)

    monkeypatch.setattr(GrpcServer, "start", note_and_listen)
    await app.start()
    await app.stop()
    assert known_at_start == [model.manifest.model for model in gateway.app.registry.models()] != []
