"""transformers' generate(), fp32: with one request it is a server that takes them one after the other. Runs in the peer's own
virtual environment."""

import importlib
import sys

from bench.engine.workload import make_parser, serve, timed, workload_of


def main() -> int:
    arguments = make_parser(__doc__).parse_args()
    workload = workload_of(arguments)
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    ids = torch.tensor(workload.prompts())

    def run(num_tokens: int) -> int:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=2,
            )
        return (output.shape[1] - ids.shape[1]) * int(ids.shape[0])

    run(4)
    serve(arguments, lambda: timed(workload, lambda: run(workload.output_tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
