"""KV memory under every interleaving of one plan: evict, save, load, copy, release and take again, in tiny memories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.kv_memory import KvMemory
from service_kit.prefix_hash import BlockHash, digest_of

# Three chains, of which the second shares its first two blocks with the first.
CHAINS = [[BlockHash(f"{chain}-{index}".encode().ljust(16)) for index in range(4)] for chain in range(3)]
CHAINS[1][:2] = CHAINS[0][:2]

_BEGINS = st.fixed_dictionaries(
    {"chain": st.sampled_from(CHAINS), "depth": st.integers(1, 4), "is_last_private": st.booleans()}
)
_ENDS = st.tuples(st.just("end"), st.integers(0, 5))
_ACTS = st.one_of(st.tuples(st.just("begin"), _BEGINS), _ENDS, st.tuples(st.just("begin"), _BEGINS))


class KvMemoryMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 7), num_slots=st.integers(0, 4))
    def make(self, num_blocks, num_slots):
        self.pool = BlockPool(num_blocks=num_blocks, block_size=16)
        self.memory = KvMemory(pool=self.pool, num_host_blocks=num_slots)
        self.device = [None] * num_blocks
        self.host = [None] * num_slots
        self.holders = []  # [names, table, number of blocks whose content has to be there]
        self.findable = set()

    @rule(acts=st.lists(_ACTS, min_size=1, max_size=10))
    def plan(self, acts):
        for kind, value in acts:
            if kind == "begin":
                self._begin(**value)
            elif self.holders:
                _, table, _ = self.holders.pop(value % len(self.holders))
                self.memory.release(table)
            self.memory.check_integrity([*(table for _, table, _ in self.holders), self.memory._pinned])
        self._compute()

    @rule()
    def drop(self):
        self.memory.drop_unheld()
        self._check()
        assert not self.memory._host.hashes()

    def _begin(self, chain, depth, is_last_private):
        found = self.memory.find(chain[:depth])
        is_last_private = is_last_private and len(found) == depth
        num_taken = sum(block is None or self.pool.num_references(block) == 0 for block in found)
        num_taken += is_last_private and found[-1] is not None
        if num_taken > self.pool.num_free:
            return
        table = self.memory.acquire(chain, found, is_last_private=is_last_private)
        table += self.memory.allocate(min(depth - len(found), self.pool.num_free))
        self.holders.append([chain[: len(table)], table, len(found)])

    def _compute(self):
        """The plan is made and executed, and what it computed is published."""
        moves = self.memory.take_moves()
        self._copy(moves.to_host, self.device, self.host)
        self._copy(moves.from_host, self.host, self.device)
        self._copy(moves.duplicated, self.device, self.device)
        for names, table, num_ready in self.holders:
            assert [self.device[block] for block in table[:num_ready]] == names[:num_ready], "wrong content is read"
        for holder in self.holders:
            names, table, num_ready = holder
            for name, block in list(zip(names, table, strict=True))[num_ready:]:
                self.device[block] = name
                self.memory.publish(block, name)
            holder[2] = len(table)
        self._check()

    def _check(self):
        for name, block in self.memory._cache._block_by_hash.items():
            assert self.device[block] == name
        for name, slot in self.memory._host._slot_by_hash.items():
            assert self.host[slot] == name
        changes = self.memory.take_changes()
        assert self.findable.isdisjoint(changes.added)
        assert self.findable.issuperset(changes.removed)
        self.findable = (self.findable | set(changes.added)) - set(changes.removed)
        assert self.findable == {digest_of(name) for name in self.memory._findable()}

    def _copy(self, pairs, source, target):
        assert len({end for _, end in pairs}) == len(pairs), "two copies into one block"
        contents = [source[start] for start, _ in pairs]
        assert None not in contents, "a block that was never filled is copied"
        for content, (_, end) in zip(contents, pairs, strict=True):
            target[end] = content


TestKvMemory = KvMemoryMachine.TestCase
TestKvMemory.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
