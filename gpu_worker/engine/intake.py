"""What comes into an engine: whether it can ever run, and its scheduling side. Pure."""

from gpu_worker.engine.port import Capabilities, RefusedSequenceError, SequenceSpec
from gpu_worker.engine.sequence import NUM_CLASSES, Sequence
from service_kit.prefix_hash import prefix_root


def check_spec(spec: SequenceSpec, capabilities: Capabilities) -> None:
    """Raises RefusedSequenceError for what can never run."""
    context_length, vocab_size = capabilities.context_length, capabilities.vocab_size
    if not spec.prompt_token_ids:
        raise RefusedSequenceError("the prompt has no tokens")
    biased = [token_id for token_id, _ in spec.sampling.logit_bias]
    for token_id in (*spec.prompt_token_ids, *spec.output_token_ids, *spec.sampling.stop_token_ids, *biased):
        if not 0 <= token_id < vocab_size:
            raise RefusedSequenceError(f"token {token_id} is outside the vocabulary of {vocab_size}")
    if not 0 <= spec.priority < NUM_CLASSES:
        raise RefusedSequenceError(f"class {spec.priority} is not one of {NUM_CLASSES}")
    num_tokens = len(spec.prompt_token_ids) + spec.sampling.max_output_tokens
    if num_tokens > context_length:
        raise RefusedSequenceError(
            f"prompt and max_output_tokens are {num_tokens} tokens together, the context holds {context_length}"
        )


def new_sequence(spec: SequenceSpec, *, fingerprint: str) -> Sequence:
    """The scheduling side of a spec. `fingerprint`: of the model, as prefix hashes have it."""
    return Sequence(
        sequence_id=spec.sequence_id,
        token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
        num_prompt_tokens=len(spec.prompt_token_ids),
        max_total_tokens=len(spec.prompt_token_ids) + spec.sampling.max_output_tokens,
        priority=spec.priority,
        prefix_root=prefix_root(model_fingerprint=fingerprint, tenant_salt=spec.prefix_salt),
    )
