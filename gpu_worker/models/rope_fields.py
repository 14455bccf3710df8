"""Reads the rotary position embedding of config.json, in both spellings. Pure."""

from collections.abc import Mapping
from typing import Any, get_args

from gpu_worker.layers.rope_config import RopeConfig, RopeType, yarn_attention_factor
from gpu_worker.models.config_fields import ConfigFields, UnsupportedModelError

# Parameters of each type beside rope_type (in old files type) and rope_theta, with their defaults.
_PARAMETERS: Mapping[RopeType, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
    "divided": {"divisors": None},
}
_OF_ALL_TYPES = frozenset({"rope_theta", "rope_type", "type"})


def parse_rope(fields: ConfigFields, *, default_theta: float, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    Raises UnsupportedModelError, also for files in which the two say different things.
    """
    source, rope = _source(fields)
    rope_type = _rope_type(source, rope)
    defaults = _PARAMETERS[rope_type]
    for name in sorted(rope.keys() - _OF_ALL_TYPES - defaults.keys()):
        if rope[name] is not None and not (name == "partial_rotary_factor" and rope[name] == 1):
            raise UnsupportedModelError(f"{source}.{name}", f"{rope[name]!r} has no meaning for rope type {rope_type}")
    parameters = ConfigFields(values=rope, defaults=defaults, prefix=f"{source}.")
    theta = _theta(fields, parameters, default_theta)
    match rope_type:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(rope_type=rope_type, theta=theta, factor=parameters.number("factor"))
        case "llama3":
            return _llama3(parameters, theta, max_position_embeddings)
        case "yarn":
            return _yarn(parameters, theta, max_position_embeddings)
        case "divided":
            return RopeConfig(rope_type=rope_type, theta=theta, divisors=_divisors(parameters))


def _source(fields: ConfigFields) -> tuple[str, Mapping[str, Any]]:
    """The spelling in use, and its parameters."""
    new, old = fields.values.get("rope_parameters"), fields.values.get("rope_scaling")
    if new and old and new != old:
        raise UnsupportedModelError("rope_scaling", "contradicts rope_parameters")
    source, rope = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if not isinstance(rope, Mapping):
        raise UnsupportedModelError(source, "not an object")
    return source, rope


def _rope_type(source: str, rope: Mapping[str, Any]) -> RopeType:
    named = rope.get("rope_type", rope.get("type", "default"))
    for rope_type in get_args(RopeType):
        if named == rope_type:
            known: RopeType = rope_type
            return known
    raise UnsupportedModelError(f"{source}.rope_type", f"{named!r} is not computed, only {sorted(_PARAMETERS)}")


def _theta(fields: ConfigFields, parameters: ConfigFields, default: float) -> float:
    inner, outer = parameters.number_or_none("rope_theta"), fields.number_or_none("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise parameters.refuse("rope_theta", f"{inner} contradicts rope_theta {outer}")
    theta = inner or outer or default
    if theta <= 1:
        raise UnsupportedModelError("rope_theta", f"{theta} is not above 1")
    return theta


def _original_context_length(parameters: ConfigFields, max_position_embeddings: int) -> int:
    return parameters.whole_or_none("original_max_position_embeddings") or max_position_embeddings


def _llama3(parameters: ConfigFields, theta: float, max_position_embeddings: int) -> RopeConfig:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.refuse("high_freq_factor", f"{high} is not above low_freq_factor {low}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=_original_context_length(parameters, max_position_embeddings),
    )


def _yarn(parameters: ConfigFields, theta: float, max_position_embeddings: int) -> RopeConfig:
    original = _original_context_length(parameters, max_position_embeddings)
    factor = parameters.number_or_none("factor") or max_position_embeddings / original
    fast, slow = parameters.number("beta_fast"), parameters.number("beta_slow")
    if fast < slow:
        raise parameters.refuse("beta_fast", f"{fast} is below beta_slow {slow}")
    mscale, mscale_all_dim = parameters.number_or_none("mscale"), parameters.number_or_none("mscale_all_dim")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_context_length=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=parameters.flag("truncate"),
        attention_factor=parameters.number_or_none("attention_factor")
        or yarn_attention_factor(factor, mscale=mscale, mscale_all_dim=mscale_all_dim),
    )


def _divisors(parameters: ConfigFields) -> tuple[float, ...]:
    """One for each pair of a head; not a type of transformers, but how GGUF files say what llama3 comes to."""
    values = parameters.value("divisors")
    if not isinstance(values, list) or not all(isinstance(each, float) and 0 < each < float("inf") for each in values):
        raise parameters.refuse("divisors", "not a list of positive numbers")
    return tuple(values)
