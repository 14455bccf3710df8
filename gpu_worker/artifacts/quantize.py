"""Makes an int8 model directory of an fp32 one: weights rounded once, here, so that every load computes the same bits."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from gpu_worker.artifacts.checkpoints import TensorSource, open_checkpoint
from gpu_worker.artifacts.gguf_description import write_description
from gpu_worker.artifacts.quantize_at_load import mark_as_int8
from gpu_worker.artifacts.smoothing import ALPHA, LayerMaxima, Tensors, round_weight, smooth_behind_norm, smooth_layer
from gpu_worker.artifacts.texts import CALIBRATION
from gpu_worker.attention.factory import make_attention
from gpu_worker.attention.port import AttentionShape
from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import INT8_PRECISION
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.int8 import LARGEST_WEIGHT
from gpu_worker.layers.linear.port import Linear
from gpu_worker.layers.linear.unfused import UnfusedLinear
from gpu_worker.models.config import ModelConfig, UnsupportedModelError, read_model_config
from gpu_worker.models.llama import LlamaModel
from gpu_worker.models.llama_tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ignored_suffixes,
    layer_prefix,
    layer_shapes,
    scale_name,
    tensor_shapes,
)
from service_kit.gguf.files import is_gguf
from service_kit.gguf.header import read_header
from service_kit.model_manifest import ModelFilesError, ModelManifest, content_revision, read_manifest
from service_kit.tokenizer_files import read_tokenizer_text

RECIPE_NAME = "quantization.json"
NUM_CALIBRATION_TOKENS = 512
_CPU = torch.device("cpu")
_BLOCK_SIZE = 16


class _Observed(UnfusedLinear):
    """Implements Linear: another one, and the largest magnitude of each input channel that it was given."""

    name = "observed"
    is_batch_invariant = True

    def __init__(self, linear: Linear, num_inputs: int) -> None:
        self._linear = linear
        self.largest = torch.zeros(num_inputs)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows):
            self.largest = torch.maximum(self.largest, rows.abs().amax(dim=0))
        return self._linear(rows)


def quantize_directory(
    source: Path, target: Path, *, name: str, on_progress: Callable[[float], None] = lambda _: None
) -> ModelManifest:
    """Fills `target`, which is there and empty, with `source`, a directory or a GGUF file, as model `name` of precision int8; its manifest comes last.

    Raises ModelFilesError, also for a source that is not fp32.
    """
    manifest = read_manifest(source)
    if manifest.precision != "fp32":
        raise ModelFilesError(f"{source}: of precision {manifest.precision}; only fp32 models are quantized")
    try:
        config = read_model_config(source)
    except UnsupportedModelError:
        return mark_as_int8(source, target, manifest, name=name)
    head_maxima, layer_maxima = calibrate(source, config, context_length=manifest.context_length)
    checkpoint = open_checkpoint(source, shapes=tensor_shapes(config), ignored_suffixes=ignored_suffixes(config))
    quantized: Tensors = {}
    for index, maxima in enumerate(layer_maxima):
        prefix = layer_prefix(index)
        read = checkpoint.read(layer_shapes(config, index), device=_CPU, dtype=torch.float32)
        layer = {tensor_name.removeprefix(prefix): tensor for tensor_name, tensor in read.items()}
        for part, tensor in _round(smooth_layer(layer, maxima, config)).items():
            quantized[prefix + part] = tensor
        on_progress((index + 1) / (config.num_layers + 1))
    quantized |= _quantize_outer(checkpoint, config, head_maxima)
    save_file({key: tensor.contiguous() for key, tensor in quantized.items()}, target / "model.safetensors")
    (target / "model.safetensors").chmod(0o644)
    _write_description(source, target, manifest)
    made = ModelManifest(
        model=name,
        revision=content_revision(target),
        precision=INT8_PRECISION,
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        bos_token_id=manifest.bos_token_id,
        eos_token_ids=manifest.eos_token_ids,
    )
    made.write(target)
    return made


def calibrate(model_path: Path, config: ModelConfig, *, context_length: int) -> tuple[torch.Tensor, list[LayerMaxima]]:
    """The largest inputs of the head and of each layer on the calibration text."""

    def observe(weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> _Observed:
        return _Observed(make_linear(weight, bias, scale), weight.shape[1])

    make_linear = LinearFactory()
    model = LlamaModel.load(model_path, config, device=_CPU, dtype=torch.float32, make_linear=observe)
    token_ids = Tokenizer.from_str(read_tokenizer_text(model_path)).encode(CALIBRATION.read()).ids
    token_ids = token_ids[: min(NUM_CALIBRATION_TOKENS, context_length)]
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    shape = AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        windows=config.windows,
    )
    runner = ModelRunner(model=model, attention=make_attention(shape, device=_CPU, dtype=torch.float32))
    whole = PlannedSequence(
        sequence_id="calibration",
        start=0,
        token_ids=tuple(token_ids),
        block_table=tuple(range(num_blocks)),
        is_sampled=True,
    )
    runner.log_probabilities(StepPlan(sequences=(whole,)), token_ids)  # of whatever: the inputs count
    maxima = [
        LayerMaxima(
            query_key_value=_largest(layer.query_key_value),
            attention_output=_largest(layer.attention_output),
            gate_up=_largest(layer.gate_up),
            down=_largest(layer.down),
        )
        for layer in model.layers
    ]
    return _largest(model.head), maxima


def _largest(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, _Observed)
    return linear.largest


def _quantize_outer(checkpoint: TensorSource, config: ModelConfig, head_maxima: torch.Tensor) -> Tensors:
    """Embedding, final norm and head. A head that was tied to the embedding gets numbers of its own."""
    head_name = EMBEDDING if config.is_tied else HEAD
    tensors = checkpoint.read({EMBEDDING, FINAL_NORM, head_name}, device=_CPU, dtype=torch.float32)
    outer = {FINAL_NORM: tensors[FINAL_NORM], HEAD: tensors[head_name]}
    smooth_behind_norm(outer, FINAL_NORM, (HEAD,), head_maxima)
    weight, scale = round_weight(outer[HEAD])
    return {EMBEDDING: tensors[EMBEDDING], FINAL_NORM: outer[FINAL_NORM], HEAD: weight, scale_name(HEAD): scale}


def _round(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    rounded: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rounded[name], rounded[scale_name(name)] = round_weight(tensor)
        else:
            rounded[name] = tensor
    return rounded


def _write_description(source: Path, target: Path, manifest: ModelManifest) -> None:
    """Everything but weights and manifest, and how the weights were made."""
    if is_gguf(source):
        write_description(read_header(source), target, eos_token_ids=manifest.eos_token_ids)
    else:
        _copy_description(source, target)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False}, indent=2) + "\n")
    recipe = {
        "source": manifest.model,
        "source_revision": manifest.revision,
        "method": "smoothquant",
        "alpha": ALPHA,
        "largest_weight": LARGEST_WEIGHT,
        "calibration_sha256": CALIBRATION.sha256,
        "calibration_tokens": NUM_CALIBRATION_TOKENS,
    }
    (target / RECIPE_NAME).write_text(json.dumps(recipe, indent=2) + "\n")


def _copy_description(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix != ".safetensors"
            and not path.name.endswith((".index.json", "sluice-model.json"))
        ):
            shutil.copy(path, target / path.name)
