from datetime import timedelta

import grpc
import pytest

from gpu_worker.engine.simulated_tokens import expected_output
from gpu_worker.session_stream import MAX_UNACKNOWLEDGED_BATCHES, StreamTimes
from inference.internal.v1 import worker_pb2
from service_kit.delta import extend_chain
from service_kit.grpc_client import INTERNAL_TOKEN_KEY
from service_kit.internal_access import InternalAccess
from tests.integration.worker.scripted_scheduler import assignment
from tests.support.polling import eventually
from tests.support.tiny_models import encode

KEEP = worker_pb2.VERDICT_ACTION_KEEP
RESEND_FROM = worker_pb2.VERDICT_ACTION_RESEND_FROM
ABORT = worker_pb2.VERDICT_ACTION_ABORT


def oracle(count, *, prior=(), nonce=0):
    return expected_output(prompt_token_ids=encode("hello"), prior_output=prior, seed=0, nonce=nonce, count=count)


async def test_hello_says_what_the_worker_is_and_holds(setup):
    async with setup.stream() as stream:
        hello = await stream.hello()
        assert hello.session_id == setup.session.session_id
        assert (hello.capabilities.engine, hello.capabilities.precision) == ("simulated", "sim")
        assert hello.load.num_free_blocks == hello.capabilities.num_blocks > 0
        assert list(hello.held) == []


async def test_an_assigned_attempt_streams_gaplessly_to_its_end(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(20)
        end = await stream.end()
        output = stream.output()
        assert (output.first, list(output.token_ids)) == (1, oracle(20))
        assert output.chain == extend_chain(0, output.token_ids)
        assert (end.finish_reason, end.output_tokens, end.failure) == ("LENGTH", 20, "")


async def test_heartbeats_name_attempts_and_positions(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(3)
        await eventually(
            lambda: bool(stream.of("heartbeat")) and any(held.position == 3 for held in stream.of("heartbeat")[-1].held)
        )
        (held,) = stream.of("heartbeat")[-1].held
        assert (held.attempt.generation_id, held.attempt.attempt, held.is_finished) == ("g", 1, False)
        assert stream.of("heartbeat")[-1].load.num_running == 1


async def test_an_end_brings_the_freed_memory_with_it_before_the_next_heartbeat_is_due(serve):
    setup = await serve(times=StreamTimes(heartbeat=timedelta(minutes=5)))
    async with setup.stream() as stream:
        num_blocks = (await stream.hello()).load.num_blocks
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(20)
        await stream.end()
        await eventually(lambda: bool(stream.of("heartbeat")))
        assert stream.of("heartbeat")[-1].load.num_free_blocks == num_blocks


async def test_a_lost_assignment_is_not_named_and_can_be_assigned_again(setup):
    async with setup.stream() as stream:
        await eventually(lambda: len(stream.of("heartbeat")) >= 2)
        assert list(stream.of("heartbeat")[-1].held) == []
        await stream.assign(assignment())
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(20)
        await stream.end()
        # The second assignment may have made it send again what was sent: a repetition for the log, not other tokens.
        numbered = {
            delta.first + offset: token_id
            for delta in stream.deltas["g"]
            for offset, token_id in enumerate(delta.token_ids)
        }
        assert [numbered[number] for number in range(1, 21)] == oracle(20)
        assert setup.engine.num_added == 1


async def test_a_cancel_right_behind_its_assignment_ends_the_attempt_as_cancelled(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await stream.cancel()
        await setup.has_added()
        await eventually(lambda: not setup.engine.engine.load_report().num_waiting)
        setup.engine.step()
        end = await stream.end()
        assert (end.finish_reason, end.output_tokens) == ("CANCELLED", 0)


async def test_an_attempt_is_sent_again_from_any_position(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(5)
        await stream.position(5)
        stream.deltas.clear()
        await stream.verdict(RESEND_FROM, resend_from=3)
        await stream.position(5)
        setup.engine.step(15)
        await stream.end()
        output = stream.output()
        assert (output.first, list(output.token_ids)) == (3, oracle(20)[2:])
        assert output.prev_chain == extend_chain(0, oracle(2))


async def test_a_resumed_attempt_numbers_on_behind_the_assigned_output(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment(attempt=3, output=oracle(7)))
        await setup.has_added()
        setup.engine.step(13)
        await stream.end()
        output = stream.output()
        assert (output.first, list(output.token_ids)) == (8, oracle(20)[7:])
        assert output.prev_chain == extend_chain(0, oracle(7))


async def test_a_higher_owner_epoch_replaces_the_stream_and_goes_on_from_its_verdict(setup):
    async with setup.stream(owner_epoch=4) as old:
        await old.assign(assignment())
        await setup.has_added()
        setup.engine.step(5)
        await old.position(5)
        async with setup.stream(owner_epoch=5, scheduler_id="other") as new:
            (held,) = (await new.hello()).held
            assert held.position == 5
            await old.closes_with(grpc.StatusCode.ABORTED)
            setup.engine.step(2)
            await eventually(lambda: len(new.of("heartbeat")) >= 2)
            assert not new.of("delta_batch"), "nothing is sent before the verdict"
            await new.verdict(RESEND_FROM, resend_from=4)
            setup.engine.step(13)
            await new.end()
            output = new.output()
            assert (output.first, list(output.token_ids)) == (4, oracle(20)[3:])


@pytest.mark.parametrize("wrong", [{"owner_epoch": 3}, {"scheduler_id": "other"}, {"session_id": "another"}], ids=str)
async def test_a_superseded_owner_or_another_session_is_refused_and_the_stream_stays(setup, wrong):
    async with setup.stream(owner_epoch=4) as stream:
        await stream.hello()
        async with setup.stream(**{"owner_epoch": 4} | wrong) as refused:
            await refused.closes_with(grpc.StatusCode.ABORTED)
        count = len(stream.of("heartbeat"))
        await eventually(lambda: len(stream.of("heartbeat")) > count + 1)
        assert stream.code is None


async def test_the_same_owner_may_come_back_under_its_epoch(setup):
    async with setup.stream(owner_epoch=4) as old:
        await old.assign(assignment())
        await setup.has_added()
        setup.engine.step(2)
        await old.position(2)
        async with setup.stream(owner_epoch=4) as new:
            await new.hello()
            await old.closes_with(grpc.StatusCode.ABORTED)
            await new.verdict(KEEP)
            setup.engine.step(1)
            await new.position(3)
            assert new.output().first == 3


async def test_a_broken_stream_costs_nothing_that_was_produced_meanwhile(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
    await setup.session.disconnected.wait()
    setup.engine.step(20)
    async with setup.stream(owner_epoch=2) as stream:
        (held,) = (await stream.hello()).held
        assert (held.position, held.is_finished) == (20, True)
        await stream.verdict(RESEND_FROM, resend_from=1)
        await stream.end()
        assert list(stream.output().token_ids) == oracle(20)


async def test_an_end_is_held_until_it_is_acknowledged(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(20)
        await stream.end()
    async with setup.stream(owner_epoch=2) as stream:
        await stream.hello()
        await stream.verdict(KEEP)
        assert (await stream.end()).finish_reason == "LENGTH"
        assert stream.output() is None
        await stream.end_ack()
        await eventually(lambda: len(setup.session.book) == 0)
        num_heartbeats = len(stream.of("heartbeat"))
        await eventually(lambda: len(stream.of("heartbeat")) > num_heartbeats)
        assert not stream.of("heartbeat")[-1].held


async def test_at_most_eight_batches_are_unacknowledged_and_tokens_gather_meanwhile(setup):
    async with setup.stream(acks=False) as stream:
        await stream.assign(assignment(max_output_tokens=40))
        await setup.has_added()
        for position in range(1, MAX_UNACKNOWLEDGED_BATCHES + 1):
            setup.engine.step()
            await stream.position(position)
        setup.engine.step(30)
        count = len(stream.of("heartbeat"))
        await eventually(lambda: len(stream.of("heartbeat")) > count + 1)
        assert len(stream.of("delta_batch")) == MAX_UNACKNOWLEDGED_BATCHES
        await stream.ack(1)
        await stream.position(38)
        assert len(stream.of("delta_batch")) == MAX_UNACKNOWLEDGED_BATCHES + 1
        assert len(stream.deltas["g"][-1].token_ids) == 30
        assert list(stream.output().token_ids) == oracle(38)


async def test_one_batch_carries_all_sequences_of_a_step(setup):
    async with setup.stream() as stream:
        await stream.assign(*(assignment(f"g{index}", prompt=f"p{index}") for index in range(5)))
        await setup.has_added(5)
        setup.engine.step()
        for index in range(5):
            await stream.position(1, f"g{index}")
        assert [len(batch.deltas) for batch in stream.of("delta_batch")] == [5]


async def test_an_aborted_attempt_is_never_mentioned_again(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        setup.engine.step(2)
        await stream.position(2)
        await stream.verdict(ABORT)
        await eventually(lambda: len(setup.session.book) == 0)
        setup.engine.step()
        assert not setup.engine.engine.has_work()
        count = len(stream.of("heartbeat"))
        await eventually(lambda: len(stream.of("heartbeat")) > count + 1)
        assert list(stream.of("heartbeat")[-1].held) == []
        assert (stream.output().last, dict(stream.ends)) == (2, {})


async def test_what_the_engine_refuses_ends_as_a_failure_with_the_reason(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment("long", max_output_tokens=10_000), assignment("bad", top_p=7), assignment())
        await setup.has_added(2)
        setup.engine.step(20)
        assert "context" in (await stream.end("long")).failure
        assert "top_p" in (await stream.end("bad")).failure
        assert (await stream.end()).finish_reason == "LENGTH"


async def test_a_silent_scheduler_is_given_up(setup):
    async with setup.stream(answers=False) as stream:
        await stream.hello()
        await stream.closes_with(grpc.StatusCode.UNAVAILABLE)
        await setup.session.disconnected.wait()


async def test_a_draining_session_finishes_what_it_has_and_takes_nothing_new(setup):
    async with setup.stream() as stream:
        await stream.assign(assignment())
        await setup.has_added()
        await stream.drain()
        await stream.assign(assignment("late"))
        await eventually(lambda: any(beat.load.is_draining for beat in stream.of("heartbeat")))
        setup.engine.step(20)
        await stream.end()
        assert not setup.session.emptied.is_set()
        await stream.end_ack()
        await eventually(setup.session.emptied.is_set)
        assert setup.engine.num_added == 1


async def test_a_stream_without_an_epoch_is_refused(setup):
    async with setup.stream(owner_epoch=0) as stream:
        await stream.closes_with(grpc.StatusCode.INVALID_ARGUMENT)


async def test_the_internal_token_is_required_where_it_is_configured(serve):
    setup = await serve(access=InternalAccess(token="s3cret"))
    async with setup.stream() as stream:
        await stream.closes_with(grpc.StatusCode.UNAUTHENTICATED)
    async with setup.stream(metadata=((INTERNAL_TOKEN_KEY, "s3cret"),)) as stream:
        await stream.hello()


async def test_two_attempts_never_mix(serve):
    setup = await serve(token_mode="nonce")
    async with setup.stream() as stream:
        await stream.assign(assignment(nonce=11))
        await setup.has_added()
        setup.engine.step(5)
        await stream.position(5)
        prior = stream.output().token_ids[:4]
        stream.deltas.clear()
        await stream.assign(assignment(attempt=2, output=prior, nonce=12))
        await setup.has_added(2)
        setup.engine.step(20)
        await stream.end()
        assert list(prior) == oracle(4, nonce=11)
        assert list(stream.output().token_ids) == oracle(16, prior=prior, nonce=12)
