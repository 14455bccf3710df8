"""llama.cpp through its batch interface, one of its sequences per request, all cores. Runs in the peer's own virtual
environment.

With --make a file of that type is written beside the model first, and run.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine.workload import Workload, make_parser, serve, timed, workload_of

_TYPES = ("F16", "Q8_0", "Q4_0")
_ROWS_OF_A_PASS = 512


def requantized(lib: Any, model: Path, kind: str) -> Path:
    made = model.with_name(f"{model.stem}-{kind}.gguf")
    if not made.exists():
        options = lib.llama_model_quantize_default_params()
        options.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.allow_requantize = True
        partial = made.with_suffix(".partial")
        if lib.llama_model_quantize(str(model).encode(), str(partial).encode(), options) != 0:
            raise RuntimeError(f"llama.cpp cannot write {made}")
        partial.rename(made)
    return made


class Runner:
    """One context with room for the whole workload."""

    def __init__(self, lib: Any, numpy: Any, model: Path, workload: Workload) -> None:
        self._lib, self._numpy, self._workload = lib, numpy, workload
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(model).encode(), parameters)
        batch_tokens = max(_ROWS_OF_A_PASS, workload.requests, workload.prompt_tokens)
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = workload.requests * (workload.prompt_tokens + workload.output_tokens + 8)
        parameters.n_batch, parameters.n_ubatch = batch_tokens, _ROWS_OF_A_PASS
        parameters.n_seq_max = workload.requests
        parameters.n_threads = parameters.n_threads_batch = os.cpu_count()
        self._context = lib.llama_init_from_model(self._model, parameters)
        self._batch = lib.llama_batch_init(batch_tokens, 0, 1)
        self._prompts = workload.prompts()

    def run(self, num_tokens: int) -> int:
        lib, workload = self._lib, self._workload
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        last = []
        for sequence, prompt in enumerate(self._prompts):
            self._decode([(token, place, sequence, place == len(prompt) - 1) for place, token in enumerate(prompt)])
            last.append(self._best(len(prompt) - 1))
        for step in range(1, num_tokens):
            position = workload.prompt_tokens + step - 1
            self._decode([(token, position, sequence, True) for sequence, token in enumerate(last)])
            last = [self._best(row) for row in range(workload.requests)]
        return num_tokens * workload.requests

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, has_logits) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, has_logits
            batch.seq_id[row][0] = sequence
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp cannot decode")

    def _best(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._workload.vocab_size,)).argmax())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--make", choices=_TYPES)
    arguments = parser.parse_args()
    workload = workload_of(arguments)
    lib, numpy = importlib.import_module("llama_cpp"), importlib.import_module("numpy")
    lib.llama_backend_init()
    model = Path(arguments.model)
    runner = Runner(lib, numpy, requantized(lib, model, arguments.make) if arguments.make else model, workload)
    runner.run(min(4, workload.output_tokens))
    serve(arguments, lambda: timed(workload, lambda: runner.run(workload.output_tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
