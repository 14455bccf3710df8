"""A model of another family behind the process border: GPT-2, whose code is that of transformers."""

import time
from datetime import timedelta

import torch
from transformers import AutoModelForCausalLM

from gpu_worker.engine.port import SequenceSpec
from gpu_worker.supervisor import EngineCommand, EngineProcess
from service_kit.delta import join
from service_kit.sampling import SamplingParams
from tests.support.tiny_decoders import SERVED, make_tiny_decoder
from tests.support.tiny_models import encode

PROMPTS = {"a": encode("hello"), "b": encode("a longer prompt than that")}
NUM_OUTPUT = 8


def greedy(directory, prompt) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUT):
            token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


async def test_the_engine_process_runs_it_and_tells_whose_code_it_is(tmp_path):
    make_tiny_decoder(tmp_path, *SERVED["GPT-2"])
    command = EngineCommand(
        model_directory=tmp_path, settings={"num_blocks": 32, "max_running": 4, "threads": 1, "block_size": 8}
    )
    engine = await EngineProcess.spawn(command, clock=time.monotonic)
    try:
        capabilities = await engine.wait_ready(timedelta(seconds=90))
        assert (capabilities.engine, capabilities.is_batch_invariant) == ("native", False)
        assert capabilities.details["model_code"] == "transformers"
        sampling = SamplingParams(max_output_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
        await engine.add(
            [
                SequenceSpec(
                    sequence_id=name,
                    prompt_token_ids=prompt,
                    output_token_ids=(),
                    sampling=sampling,
                    priority=0,
                    nonce=0,
                )
                for name, prompt in PROMPTS.items()
            ]
        )
        deltas, running = {name: [] for name in PROMPTS}, set(PROMPTS)
        while running:
            frame = await engine.next_frame()
            await engine.ack(frame.output.step)
            for output in frame.output.outputs:
                deltas[output.sequence_id] += [output.delta] if output.delta else []
                running -= {output.sequence_id} if output.finish else set()
    finally:
        await engine.close(timedelta(seconds=10))
    for name, prompt in PROMPTS.items():
        assert list(join(deltas[name]).token_ids) == greedy(tmp_path, prompt)
