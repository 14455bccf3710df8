"""Names and shapes of the tensors of a Llama-family checkpoint. Pure."""

from gpu_worker.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# Buffers that old checkpoints carry and that follow from the config.
_DERIVED = (".rotary_emb.inv_freq",)

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of a checkpoint of this config."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.is_tied:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        shapes |= layer_shapes(config, index)
    return shapes


def ignored_suffixes(config: ModelConfig) -> tuple[str, ...]:
    """What a checkpoint may carry beside, unread: derived buffers, and the head of a tied model."""
    return (*_DERIVED, HEAD) if config.is_tied else _DERIVED


def int8_names(config: ModelConfig) -> frozenset[str]:
    """The weights that are int8 in a quantized checkpoint, and have scales beside them: those of every matrix product.

    The head is one of them, so that the embedding of a quantized checkpoint is never tied to it.
    """
    return frozenset(name for name in tensor_shapes(config) if name.endswith("_proj.weight")) | {HEAD}


def with_scales(shapes: Shapes, quantized: frozenset[str]) -> Shapes:
    """`shapes` and the scale [out] of each quantized weight among them."""
    return shapes | {scale_name(name): shape[:1] for name, shape in shapes.items() if name in quantized}


def scale_name(weight_name: str) -> str:
    """Of the tensor with the scales of an int8 weight's rows."""
    return f"{weight_name}_scale"


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def layer_shapes(config: ModelConfig, index: int) -> Shapes:
    """The tensors of one layer."""
    hidden, inner, head = (config.hidden_size,), config.intermediate_size, (config.head_dim,)
    shapes: Shapes = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if config.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (query, *hidden),
        "k_proj": (key, *hidden),
        "v_proj": (key, *hidden),
        "o_proj": (*hidden, query),
    }
    mlp = {"gate_proj": (inner, *hidden), "up_proj": (inner, *hidden), "down_proj": (*hidden, inner)}
    for part, matrices in (("self_attn", attention), ("mlp", mlp)):
        for name, shape in matrices.items():
            shapes |= _projection(f"{part}.{name}", shape, has_bias=name in config.projections_with_bias)
    return {f"{layer_prefix(index)}{name}": shape for name, shape in shapes.items()}


def _projection(name: str, shape: tuple[int, ...], *, has_bias: bool) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})
