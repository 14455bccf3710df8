"""What the draft model's KV memory holds of each sequence, and how it is rolled back. Pure."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from gpu_worker.engine.block_pool import BlockPool


class DraftContext:
    """The blocks of one sequence; the first `num_computed` tokens of it stand in them.

    Proposed tokens are computed as well. They are remembered until it is known what was drawn instead of them.
    """

    def __init__(self) -> None:
        self.block_table: list[int] = []
        self.num_computed = 0
        self._proposed: list[int] = []

    def compute(self, token_ids: Sequence[int], num_known: int) -> None:
        """`token_ids` were computed; those behind the first `num_known` tokens of the sequence are only proposed."""
        end = self.num_computed + len(token_ids)
        self._proposed += token_ids[len(token_ids) - max(0, min(len(token_ids), end - num_known)) :]
        self.num_computed = end

    def roll_back(self, token_ids: Sequence[int]) -> None:
        """Forgets proposed tokens from the first on that is not what the sequence has there, and always the newest token,
        behind which is to be proposed."""
        start = self.num_computed - len(self._proposed)
        num_right = 0
        for proposed, token_id in zip(self._proposed, token_ids[start:], strict=False):
            if proposed != token_id:
                break
            num_right += 1
        self._proposed.clear()
        self.num_computed = min(start + num_right, len(token_ids) - 1)


class DraftContexts:
    """The contexts of all sequences over one pool; those that were not used for the longest lose their blocks first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._contexts: OrderedDict[str, DraftContext] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def num_missing(self, sequence_id: str, token_ids: Sequence[int]) -> int:
        """Tokens that have to be computed before the first one can be proposed."""
        context = self._contexts.get(sequence_id)
        return len(token_ids) - (context.num_computed if context is not None else 0)

    def use(self, sequence_id: str, token_ids: Sequence[int]) -> DraftContext:
        """The context of a sequence, rolled back to what is right of it."""
        context = self._contexts.setdefault(sequence_id, DraftContext())
        self._contexts.move_to_end(sequence_id)
        context.roll_back(token_ids)
        self._trim(context)
        return context

    def reserve(self, context: DraftContext, num_tokens: int, *, spared: Collection[str]) -> bool:
        """Gets blocks for so many tokens, from sequences that are not spared if need be; False when they do not suffice."""
        num_missing = self._pool.num_blocks_for(num_tokens) - len(context.block_table)
        for sequence_id in list(self._contexts):
            if num_missing <= self._pool.num_free:
                break
            if sequence_id not in spared:
                self.forget(sequence_id)
        if num_missing > self._pool.num_free:
            return False
        if num_missing > 0:
            context.block_table += self._pool.allocate(num_missing)
        return True

    def forget(self, sequence_id: str) -> None:
        context = self._contexts.pop(sequence_id, None)
        if context is not None:
            self._pool.release(context.block_table)

    def check_integrity(self) -> None:
        """Raises BlockAccountingError or AssertionError unless blocks and contexts agree."""
        self._pool.check_integrity()
        held = [block for context in self._contexts.values() for block in context.block_table]
        assert len(held) == len(set(held)) == self._pool.num_blocks - self._pool.num_free, "a draft block is held twice"
        for context in self._contexts.values():
            assert context.num_computed <= len(context.block_table) * self._pool.block_size, "tokens without a block"

    def _trim(self, context: DraftContext) -> None:
        num_blocks = self._pool.num_blocks_for(context.num_computed)
        self._pool.release(context.block_table[num_blocks:])
        del context.block_table[num_blocks:]
