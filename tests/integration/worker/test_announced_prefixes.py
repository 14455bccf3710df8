"""What a scheduler hears of the worker's prefix cache and of its room."""

from gpu_worker.engine.frames import OutputFrame
from gpu_worker.engine.port import CacheChanges, LoadReport, StepOutput
from service_kit.prefix_hash import block_hashes, digest_of, model_fingerprint, prefix_root
from tests.integration.worker.scripted_scheduler import assignment
from tests.support.polling import eventually
from tests.support.tiny_models import encode

PROMPT = "a prompt of three full blocks and a bit more"
NUM_BLOCKS = len(PROMPT) // 16


async def run(setup, stream, *assignments):
    before = setup.engine.num_added
    await stream.assign(*assignments)
    await setup.has_added(before + len(assignments))
    setup.engine.step(20)


def digests_of(setup, salt=""):
    capabilities = setup.session.capabilities
    fingerprint = model_fingerprint(revision=capabilities.model_revision, precision=capabilities.precision)
    root = prefix_root(model_fingerprint=fingerprint, tenant_salt=salt)
    return {digest_of(each) for each in block_hashes(root, encode(PROMPT), capabilities.block_size)}


def heard(stream):
    """The set of digests that a scheduler has after all messages."""
    digests = set(stream.messages[0].hello.cached_prefixes)
    for beat in stream.of("heartbeat"):
        assert digests.isdisjoint(beat.cached_prefixes_added)
        assert digests.issuperset(beat.cached_prefixes_removed)
        digests -= set(beat.cached_prefixes_removed)
        digests |= set(beat.cached_prefixes_added)
    return digests


async def test_heartbeats_say_what_came_to_the_cache_and_a_new_stream_begins_with_everything(setup):
    async with setup.stream() as stream:
        assert list((await stream.hello()).cached_prefixes) == []
        await run(setup, stream, assignment(prompt=PROMPT, prefix_salt="t"))
        await eventually(lambda: heard(stream) == digests_of(setup, "t"))
        assert len(digests_of(setup, "t")) == NUM_BLOCKS
        assert sum(bool(beat.cached_prefixes_added) for beat in stream.of("heartbeat")) == 1
    async with setup.stream(owner_epoch=2) as stream:
        assert set((await stream.hello()).cached_prefixes) == digests_of(setup, "t")
        await run(setup, stream, assignment("other", prompt=PROMPT, prefix_salt="u"))
        await eventually(lambda: heard(stream) == digests_of(setup, "t") | digests_of(setup, "u"))


async def test_heartbeats_say_what_left_the_cache(serve):
    setup = await serve(num_blocks=5)
    async with setup.stream() as stream:
        await stream.hello()
        await run(setup, stream, assignment(prompt=PROMPT))
        await eventually(lambda: heard(stream) == digests_of(setup))
        await run(setup, stream, assignment("other", prompt="x" * 40))
        await eventually(lambda: any(beat.cached_prefixes_removed for beat in stream.of("heartbeat")))
        count = len(stream.of("heartbeat"))
        await eventually(lambda: len(stream.of("heartbeat")) > count)
        assert len(heard(stream)) == setup.session.load.num_cached_blocks <= 5


async def test_a_cached_prompt_is_reported_with_its_end(setup):
    async with setup.stream() as stream:
        await run(setup, stream, assignment("first", prompt=PROMPT, prefix_salt="t"))
        await run(
            setup,
            stream,
            assignment("same", prompt=PROMPT, prefix_salt="t"),
            assignment("stranger", prompt=PROMPT, prefix_salt="u"),
        )
        assert (await stream.end("first")).cached_prompt_tokens == 0
        assert (await stream.end("same")).cached_prompt_tokens == 16 * NUM_BLOCKS
        assert (await stream.end("stranger")).cached_prompt_tokens == 0


async def test_every_number_of_a_load_report_reaches_the_scheduler(setup):
    load = LoadReport(
        step=1,
        num_running=2,
        num_waiting=3,
        max_running=4,
        largest_batch=5,
        num_free_blocks=6,
        num_blocks=7,
        block_size=8,
        kv_waste=0.5,
        room_blocks=(11, 10, 9),
        num_preempted=12,
        num_cached_blocks=13,
        num_computed_prompt_tokens=14,
        num_cached_prompt_tokens=15,
        num_blocks_to_host=16,
        num_blocks_from_host=17,
        num_failed=18,
        num_draft_steps=19,
        num_draft_tokens=20,
        num_accepted_draft_tokens=21,
        is_speculating=True,
        num_speculation_stops=22,
    )
    output = StepOutput(step=1, outputs=(), cache_changes=CacheChanges(added=(1,)))
    setup.session.take_frame(OutputFrame(output=output, load=load, num_pauses=0))
    async with setup.stream() as stream:
        said = (await stream.hello()).load
        assert list(said.room_blocks) == [11, 10, 9]
        names = {field.name for field in said.DESCRIPTOR.fields} - {"room_blocks", "is_draining"}
        assert {name: getattr(said, name) for name in names} == {name: getattr(load, name) for name in names}


async def test_before_the_first_step_a_worker_has_room_for_every_class(setup):
    async with setup.stream() as stream:
        load = (await stream.hello()).load
        assert list(load.room_blocks) == [load.num_blocks] * 3
