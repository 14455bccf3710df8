"""The device's way of running steps gives the tokens of the plain one. On a CPU the kernels are interpreted, and graphs are
bodies that are called again."""

import dataclasses
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from gpu_worker.attention.layered import LayerGeometry
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.engine.cuda_graphs import padded_sizes
from gpu_worker.engine.device_loading import affordable_blocks, largest_plan
from gpu_worker.engine.device_pages import DrawnIds
from gpu_worker.engine.execution import DeviceLostError
from gpu_worker.engine.loading import load_parts, make_engine
from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.sequence import BlockMoves, PlannedSequence, StepPlan
from gpu_worker.engine.settings import EngineSettings
from tests.support.device_parts import load_rehearsed
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.paged_attention import need_triton
from tests.support.speculation import AlwaysSpeculating, Oracle
from tests.support.tiny_models import make_tiny_llama

SETTINGS = EngineSettings(num_blocks=40, block_size=8, max_running=4, token_budget=16, speculation="off")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    need_triton()
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("here the kernels run on the GPU")
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, context_length=64)
    return load_rehearsed(directory, SETTINGS)


def test_outputs_are_those_of_the_plain_runner(rehearsed):
    plain, ahead, graphs = rehearsed
    specs = [
        make_spec("greedy", b"hello there, you", max_output_tokens=9),
        make_spec("seeded", b"abc", max_output_tokens=5, temperature=0.9, seed=5),
        make_spec("limited", b"abd", max_output_tokens=4, temperature=1.1, top_p=0.8, top_k=30, seed=6),
        make_spec("needs the host", b"abe", max_output_tokens=3, frequency_penalty=1.0, logprobs=2),
    ]
    assert type(plain.runner) is ModelRunner
    expected, found = (run_to_end(make_engine(parts, SETTINGS), specs) for parts in (plain, ahead))
    assert {name: result.token_ids for name, result in found.items()} == {
        name: result.token_ids for name, result in expected.items()
    }
    recorded = {key for key in graphs.replayed if key[0] == "model"}
    assert {("model", 4), ("model", 2)} <= recorded, "decodes are padded to a recorded size"
    assert {kind for kind, _ in graphs.replayed} >= {"greedy", "limited"}


def test_proposed_tokens_are_verified_by_the_kernels_too(rehearsed):
    """Several rows of a decode: those of a short chunk."""
    plain, ahead, _ = rehearsed
    prompts = {"greedy": b"hello there, you", "seeded": b"abc"}
    specs = [
        make_spec("greedy", prompts["greedy"], max_output_tokens=9),
        make_spec("seeded", prompts["seeded"], max_output_tokens=7, temperature=0.9, seed=5),
    ]
    expected = run_to_end(make_engine(plain, SETTINGS), specs)

    def next_tokens(sequence):
        name = sequence.sequence_id
        return expected[name].token_ids[sequence.num_tokens - len(prompts[name]) :]

    speculation = AlwaysSpeculating(make_proposer=lambda: Oracle(next_tokens, seed=3))
    engine = make_engine(dataclasses.replace(ahead, speculation=speculation), SETTINGS)
    found = run_to_end(engine, specs, after_step=engine.check_integrity)
    assert {name: each.token_ids for name, each in found.items()} == {
        name: each.token_ids for name, each in expected.items()
    }
    load = engine.load_report()
    assert 0 < load.num_accepted_draft_tokens < load.num_draft_tokens


def test_sizes_end_with_the_largest_batch_and_waste_less_than_half():
    for most in (1, 5, 64, 100, 256):
        sizes = padded_sizes(most)
        assert sizes == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, most)
        assert all(larger <= max(2 * size, size + 8) for size, larger in pairwise(sizes))
    assert len(padded_sizes(256)) < 30


def test_the_ids_of_two_steps_are_on_their_way_at_a_time():
    ids = DrawnIds(num_rows=3, device=torch.device("cpu"))
    ids.on_device.copy_(torch.tensor([1, 2, 3]))
    first = ids.fetch(2)
    ids.on_device.copy_(torch.tensor([4, 5, 6]))
    second = ids.fetch(3)
    assert (first.wait(), second.wait()) == ([1, 2], [4, 5, 6])


class FakeMemory:
    """10,000 bytes, of which 4,000 are taken."""

    def __init__(self):
        self.calls = 0

    def peak_of(self, call):
        call()
        self.calls += 1
        return 500

    def free_and_total(self):
        return 6000, 10_000


def test_blocks_are_what_weights_and_the_largest_step_leave_of_the_share(rehearsed):
    plain, _, _ = rehearsed
    memory = FakeMemory()
    layers = (LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=16),) * 2
    loaded = SimpleNamespace(model=plain.runner._model, context_length=64, layers=layers)
    num_blocks = affordable_blocks(
        memory,
        loaded,
        lambda shape: ReferenceAttention(shape, device=torch.device("cpu"), dtype=torch.float32),
        settings=SETTINGS,
        block_bytes=100,
    )
    # 6,000 free, without the 1,000 that are not the engine's, and without two pools of 500.
    assert (num_blocks, memory.calls) == (40, 1)
    plan = largest_plan(SETTINGS, 64)
    assert (plan.num_tokens, len(plan.sequences)) == (SETTINGS.token_budget, SETTINGS.max_running)


def test_an_error_that_a_context_does_not_survive_is_told_as_such(rehearsed, monkeypatch):
    _, ahead, _ = rehearsed

    def fail(moves):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(ahead.runner._attention, "move", fail)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        ahead.runner.move(BlockMoves(duplicated=((0, 1),)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_a_gpu_follows_the_one_on_the_cpu(tmp_path, dtype):
    """Every token of the CPU's fp32 output is fed; the device's logits are within the tolerance of its type."""
    make_tiny_llama(tmp_path, context_length=64)
    cpu = load_parts(tmp_path, SETTINGS)
    settings = dataclasses.replace(SETTINGS, device="cuda", dtype=dtype, num_blocks=None)
    gpu = load_parts(tmp_path, settings)
    assert type(gpu.runner) is not ModelRunner
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    for start, ids in ((0, tuple(b"hello there, you")), (16, (97,)), (17, (98,))):
        planned = PlannedSequence(sequence_id="a", start=start, token_ids=ids, block_table=(0, 1, 2), is_sampled=True)
        plan = StepPlan(sequences=(planned,))
        expected, found = cpu.runner.logits(plan), gpu.runner.logits(plan).cpu()
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    if dtype == "float32":
        specs = [make_spec("a", b"hello", max_output_tokens=12), make_spec("b", b"abc", temperature=0.9, seed=5)]
        expected, found = (
            {name: result.token_ids for name, result in run_to_end(make_engine(*each), specs).items()}
            for each in ((cpu, SETTINGS), (gpu, settings))
        )
        assert found == expected
