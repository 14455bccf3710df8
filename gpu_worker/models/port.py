"""What the model runner asks of a model, whoever's code computes it."""

from typing import Protocol

import torch

from gpu_worker.attention.port import StepAttention


class PackedModel(Protocol):
    """A decoder with its weights, read-only. Its KV memory belongs to the attention that it is handed."""

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where token ids and positions have to be."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether everything but attention gives a row the same bits whatever rows stand beside it."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the packed batch, int64 [T] each, and returns what `logits` needs of the chosen rows [R, …].

        `rows` may be empty, and without it all are chosen. `attend` is called once per layer, whichever rows are chosen.
        """

    def logits(self, chosen: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of rows of `forward`'s result."""
