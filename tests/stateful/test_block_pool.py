"""The block pool under random use: every block is either free or held, and never both."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpu_worker.engine.block_pool import BlockPool, OutOfBlocksError


class BlockPoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(num_blocks=st.integers(1, 24))
    def make_pool(self, num_blocks):
        self.pool = BlockPool(num_blocks=num_blocks, block_size=16)
        self.counts = [0] * num_blocks
        self.kept = set()

    @rule(target=held, count=st.integers(0, 8))
    def allocate(self, count):
        num_free = self.counts.count(0)
        try:
            blocks = self.pool.allocate(count)
        except OutOfBlocksError:
            assert count > num_free
            return []
        assert count <= num_free
        assert len(set(blocks)) == count
        for block in blocks:
            assert self.counts[block] == 0, "a held block was handed out again"
            self.counts[block] = 1
            self.kept.discard(block)
        return blocks

    @rule(target=held, blocks=held)
    def share(self, blocks):
        # Held by somebody at least as long as this copy of the list stands in the bundle.
        shared = [block for block in blocks if self.counts[block] > 0]
        for block in shared:
            self.pool.share(block)
            self.counts[block] += 1
        return shared

    @rule(blocks=held)
    def keep(self, blocks):
        for block in blocks:
            if self.counts[block] > 0:
                self.pool.keep(block)
                self.kept.add(block)

    @rule(target=held)
    def share_what_is_kept(self):
        kept = [block for block in self.kept if self.counts[block] == 0][:2]
        for block in kept:
            self.pool.share(block)
            self.counts[block] += 1
        return kept

    @rule()
    def forget(self):
        unheld = {block for block in self.kept if self.counts[block] == 0}
        assert set(self.pool.forget_unheld()) == unheld
        self.kept -= unheld

    @rule(blocks=consumes(held))
    def release(self, blocks):
        self.pool.release(blocks)
        for block in blocks:
            self.counts[block] -= 1

    @invariant()
    def counts_are_conserved(self):
        self.pool.check_integrity()
        assert self.pool.num_free == self.counts.count(0)
        assert {block for block in range(self.pool.num_blocks) if self.pool.is_kept(block)} == self.kept
        assert [self.pool.num_references(block) for block in range(self.pool.num_blocks)] == self.counts


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
