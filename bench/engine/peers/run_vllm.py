"""vLLM's CPU backend, offline, fp32, compiled, without its prefix cache. Runs in the peer's own virtual environment."""

import importlib
import os
import sys

from bench.engine.workload import make_parser, serve, timed, workload_of

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> int:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    workload = workload_of(arguments)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        arguments.model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=max(64, workload.requests),
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts()]

    def run(num_tokens: int, num_prompts: int) -> int:
        sampling = vllm.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        results = engine.generate(prompts[:num_prompts], sampling, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    run(4, 4)
    serve(arguments, lambda: timed(workload, lambda: run(workload.output_tokens, len(prompts))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
