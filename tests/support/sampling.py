"""Sample requests, and a sampler that is slow and plain: one row, 64 bits, a full sort."""

from dataclasses import dataclass

import numpy as np

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.sampler import uniform
from service_kit.sampling import SamplingParams


def request(*, sequence_id="s", position=1, prompt=(1,), output=(), banned=(), **sampling):
    """A request whose sequence is `prompt` and `output`; further fields are those of SamplingParams."""
    return SampleRequest(
        sequence_id=sequence_id,
        sampling=SamplingParams(max_output_tokens=1000, **sampling),
        position=position,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        banned_token_ids=frozenset(banned),
    )


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The tokens that may be drawn with their probabilities, and the tokens a right sampler may answer."""

    probabilities: dict[int, float]
    acceptable: set[int]


def edited_logits(row, asked):
    """Bias, bans and penalties, one token after the other."""
    sampling = asked.sampling
    logits = [float(value) for value in row]
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in asked.banned_token_ids:
        logits[token] = -np.inf
    output = list(asked.token_ids[asked.num_prompt_tokens :])
    for token in set(asked.token_ids):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return np.array(logits)


def expected_probabilities(logits, sampling, *, top_p):
    """Token to probability after temperature, top-k, top-p and min-p, renormalised."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order
    if 0 < sampling.top_k < len(logits):
        kept = [token for token in order if logits[token] >= logits[order[sampling.top_k - 1]]]
    if top_p < 1:
        total = sum(weights[token] for token in kept)
        reached, last = 0.0, kept[-1]
        for token in kept:
            reached += weights[token]
            if reached / total >= top_p:
                last = token
                break
        kept = [token for token in kept if logits[token] >= logits[last]]
    kept = [token for token in kept if weights[token] >= sampling.min_p * max(weights)]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in sorted(kept)}


def expect(row, asked, *, slack=2e-6):
    """What a right sampler may answer: sums that miss a limit by less than `slack` may fall on either side."""
    sampling = asked.sampling
    logits = edited_logits(row, asked)
    if sampling.temperature == 0:
        best = int(np.flatnonzero(logits >= logits.max() - 1e-5)[0])
        near = set(np.flatnonzero(logits >= logits.max() - 1e-5).tolist())
        return Expected(probabilities={best: 1.0}, acceptable=near)
    acceptable = set()
    for top_p in {sampling.top_p, min(sampling.top_p + slack, 1.0), max(sampling.top_p - slack, 1e-9)}:
        probabilities = expected_probabilities(logits, sampling, top_p=top_p)
        value = uniform(sampling.seed, asked.position)
        reached = 0.0
        for token, probability in probabilities.items():
            if reached - slack <= value <= reached + probability + slack:
                acceptable.add(token)
            reached += probability
    return Expected(probabilities=expected_probabilities(logits, sampling, top_p=sampling.top_p), acceptable=acceptable)
