"""The real model through all services: the same greedy output as transformers, alone and in a batch."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service_kit.model_manifest import read_manifest
from sluice.client import SluiceClient
from sluice.client_events import Message, Sampling
from tests.support.reader import Reader
from tests.support.stack import RunningStack, eventually, running_stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 64
NEAR_TIE = 1e-3
"""A first difference is allowed where the reference's own two best logits are closer than this."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three laws of motion were formulated by",
    "Dear Sir or Madam,\nI am writing to",
    "1, 2, 3, 4, 5, 6,",
    "In 1969, the first human being",
    "Une recette simple pour faire du pain:",
    "Q: What is photosynthesis?\nA:",
)


@pytest.fixture(scope="module")
def real_stack(smollm2: Path) -> Iterator[RunningStack]:
    with running_stack(native_model=smollm2) as stack:
        yield stack


class Reference:
    """transformers on the same files."""

    def __init__(self, directory: Path) -> None:
        # Loaded here: collecting the tests must not take torch's time.
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self._torch: Any = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._end_ids = set(read_manifest(directory).eos_token_ids)

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """Output ids before the end token, at most NUM_TOKENS each; one left-padded batch."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt_ids) for prompt_ids in prompts]
        input_ids = [[0] * pad + prompt_ids for pad, prompt_ids in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * len(prompt_ids) for pad, prompt_ids in zip(padding, prompts, strict=True)]
        with self._torch.inference_mode():
            output = self._model.generate(
                self._torch.tensor(input_ids),
                attention_mask=self._torch.tensor(mask),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=sorted(self._end_ids),
                pad_token_id=0,
            )
        rows: list[list[int]] = output[:, longest:].tolist()
        return [
            next((ids[:place] for place, token_id in enumerate(ids) if token_id in self._end_ids), ids) for ids in rows
        ]

    def top2_gap(self, context_ids: list[int]) -> float:
        """Distance of the two best logits of the next token."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([context_ids])).logits[0, -1]
        best = self._torch.topk(logits, 2).values
        return float(best[0] - best[1])

    def log_probabilities(self, context_ids: list[int]) -> list[list[float]]:
        """Of every token behind every position of the context."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([context_ids])).logits[0]
        rows: list[list[float]] = self._torch.log_softmax(logits, dim=-1).tolist()
        return rows


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and greedy output of every prompt."""
    prompts = [reference.tokenizer.encode(prompt) for prompt in PROMPTS]
    return list(zip(prompts, reference.greedy(prompts), strict=True))


def _start(client: SluiceClient, stack: RunningStack, prompt: str) -> Reader:
    sampling = Sampling(temperature=0, max_output_tokens=NUM_TOKENS)
    return Reader(client.generate(stack.local.model, prompt, sampling=sampling))


def _check(reference: Reference, prompt_ids: list[int], wanted: list[int], got: list[int], how: str) -> None:
    """Equal, or first different at a near-tie, which is printed."""
    if got == wanted:
        return
    pairs = zip([*wanted, None], [*got, None], strict=False)
    place = next(number for number, (left, right) in enumerate(pairs) if left != right)
    gap = reference.top2_gap(prompt_ids + wanted[:place])
    print(f"first difference {how} at token {place + 1}: top-2 gap {gap:.2e}")
    assert gap < NEAR_TIE, f"{how}: token {place + 1} differs although the reference's top-2 gap is {gap:.2e}"


async def test_greedy_output_equals_that_of_transformers_alone(
    real_stack: RunningStack, reference: Reference, expected: list[tuple[list[int], list[int]]]
) -> None:
    async with real_stack.client() as client:
        for prompt, (prompt_ids, wanted) in zip(PROMPTS, expected, strict=True):
            reader = _start(client, real_stack, prompt)
            await reader.until_end(120)
            assert reader.accepted.prompt_tokens == len(prompt_ids)
            _check(reference, prompt_ids, wanted, list(reader.token_ids), "alone")


async def test_greedy_output_equals_that_of_transformers_all_at_once(
    real_stack: RunningStack, reference: Reference, expected: list[tuple[list[int], list[int]]]
) -> None:
    async with real_stack.client() as client:
        readers = [_start(client, real_stack, prompt) for prompt in PROMPTS]
        await asyncio.gather(*(reader.until_end(240) for reader in readers))
    for reader, (prompt_ids, wanted) in zip(readers, expected, strict=True):
        _check(reference, prompt_ids, wanted, list(reader.token_ids), "in a batch")


async def test_a_repeated_prompt_is_cached_for_its_tenant_and_gives_the_same_bits(
    real_stack: RunningStack, reference: Reference
) -> None:
    prompt = "In the beginning the universe was created. " * 8
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=4, max_output_tokens=12, logprobs=2, repetition_penalty=1.2)
    create = [sys.executable, "-m", "sluice", "keys", "create", "--tenant", "other"]
    environment = {**os.environ, "SLUICE_HOME": str(real_stack.home.root)}
    created = await asyncio.to_thread(
        subprocess.run, create, env=environment, check=True, capture_output=True, text=True
    )
    readers = []
    for api_key in (None, None, created.stdout.strip()):
        async with real_stack.client(api_key=api_key) as client:
            readers.append(Reader(client.generate(real_stack.local.model, prompt, sampling=sampling)))
            await readers[-1].until_end(120)
    first, second, other = readers
    prompt_ids = reference.tokenizer.encode(prompt)
    cached = [reader.finished.cached_prompt_tokens for reader in readers]
    assert cached == [0, len(prompt_ids) // 16 * 16, 0]
    assert first.token_ids == second.token_ids == other.token_ids
    assert first.logprobs == second.logprobs == other.logprobs, "down to the last bit"
    rows = reference.log_probabilities([*prompt_ids, *first.token_ids])[len(prompt_ids) - 1 : -1]
    assert len(first.logprobs) == len(rows) == len(first.token_ids)
    for token_id, logprob, row in zip(first.token_ids, first.logprobs, rows, strict=True):
        assert logprob.logprob == pytest.approx(row[token_id], abs=1e-4)
        assert [top.logprob for top in logprob.top] == pytest.approx(sorted(row, reverse=True)[:2], abs=1e-4)


async def test_a_short_request_that_arrives_last_overtakes_long_ones_in_a_large_batch(
    real_stack: RunningStack,
) -> None:
    finished: list[str] = []

    async def ask(client: SluiceClient, name: str, num_tokens: int, words: int) -> str:
        sampling = Sampling(temperature=0, max_output_tokens=num_tokens, ignore_eos=True)
        question = [Message(role="user", content="tell me about rivers " * words)]
        reader = Reader(client.generate(real_stack.local.model, question, sampling=sampling))
        await reader.until_end(240)
        finished.append(name)
        return reader.accepted.generation_id

    async with real_stack.client() as client:
        long_ones = [
            asyncio.create_task(ask(client, f"long {number}", 64 + number, words=1 + number)) for number in range(15)
        ]
        await eventually(lambda: _all_run(real_stack, len(long_ones)), what="the long ones run")
        await ask(client, "short", 4, words=1)
        generation_ids = await asyncio.gather(*long_ones)
    assert finished[0] == "short"
    spans = await _decode_spans(real_stack, generation_ids[-1])
    largest = max(int(span["attributes"]["largest_batch"]) for span in spans)
    waste = max(float(span["attributes"]["kv_waste"]) for span in spans)
    print(f"largest batch {largest}, KV waste at the end of a sequence {waste:.1%}")
    assert largest >= 12


async def _all_run(stack: RunningStack, count: int) -> bool:
    row = await asyncio.to_thread(stack.row, "SELECT count(*) AS n FROM generations WHERE state = 'RUNNING'")
    return row is not None and row["n"] >= count


async def _decode_spans(stack: RunningStack, generation_id: str) -> list[dict[str, Any]]:
    """The decode spans of all generations, once that of `generation_id` is written."""

    def read() -> list[dict[str, Any]]:
        lines = [
            line for path in stack.home.traces.glob("gpu_worker-*.jsonl") for line in path.read_text().splitlines()
        ]
        return [span for span in map(json.loads, lines) if span["name"] == "worker.decode"]

    async def is_there() -> bool:
        return any(span["attributes"]["generation_id"] == generation_id for span in read())

    await eventually(is_there, what="the decode span is written", timeout_s=15)
    return read()
