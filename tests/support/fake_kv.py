"""A KV memory of tokens instead of numbers: executes plans and checks that every block read holds what it should."""

from service_kit.prefix_hash import block_hashes


def chain_of(root, token_ids):
    """What the KV of each token depends on: itself and everything before it."""
    chain, value = [], hash(root)
    for token_id in token_ids:
        value = hash((value, token_id))
        chain.append(value)
    return chain


class FakeKv:
    """Executes moves and computations of plans in the order the engine does; asserts whenever a wrong block is read."""

    def __init__(self, *, num_blocks, block_size, num_host_blocks=0):
        self.block_size = block_size
        self.device = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(num_host_blocks)]

    def move(self, moves):
        """Copies; each kind reads everything before it writes anything, so order within a kind must not matter."""
        self._copy(moves.to_host, self.device, self.host)
        self._copy(moves.from_host, self.host, self.device)
        self._copy(moves.duplicated, self.device, self.device)
        sources = {source for source, _ in moves.duplicated}
        assert sources.isdisjoint(target for _, target in moves.duplicated)

    def spoil(self, moves):
        """The moves failed halfway: whatever they were to write is garbage."""
        for _, slot in moves.to_host:
            self.host[slot] = ["garbage"] * self.block_size
        for _, block in (*moves.from_host, *moves.duplicated):
            self.device[block] = ["garbage"] * self.block_size

    def compute(self, plan, sequences, *, failing=()):
        """Writes the planned tokens of the sequences, those of failing ones as garbage.

        Checks what is read before all writes and after them.
        """
        self._check_writes(plan)
        going = [planned for planned in plan.sequences if planned.sequence_id in sequences]
        for planned in going:
            self.check(sequences[planned.sequence_id], planned.block_table, planned.start)
        for planned in going:
            sequence = sequences[planned.sequence_id]
            end = planned.context_length
            token_ids = [*sequence.token_ids[: end - planned.num_drafts], *planned.draft_token_ids]
            assert planned.token_ids == tuple(token_ids[planned.start : end])
            chain = chain_of(sequence.prefix_root, token_ids)
            for position in range(planned.start, end):
                block, slot = planned.block_table[position // self.block_size], position % self.block_size
                is_failing = planned.sequence_id in failing
                self.device[block][slot] = "garbage" if is_failing else chain[position]
        for planned in going:
            if planned.sequence_id not in failing:
                num_tokens = planned.context_length - planned.num_drafts
                self.check(sequences[planned.sequence_id], planned.block_table, num_tokens)

    def check(self, sequence, block_table, num_tokens):
        """The first tokens of the sequence stand in its blocks."""
        chain = chain_of(sequence.prefix_root, sequence.token_ids[:num_tokens])
        stored = [slot for block in block_table for slot in self.device[block]][:num_tokens]
        assert stored == chain, f"{sequence.sequence_id} reads wrong KV"

    def check_names(self, memory, sequences):
        """Every block that can be found holds what its name promises."""
        promised = {}
        for sequence in sequences:
            if sequence.prefix_root is None:
                continue
            chain = chain_of(sequence.prefix_root, sequence.token_ids)
            names = block_hashes(sequence.prefix_root, sequence.token_ids, self.block_size)
            for index, name in enumerate(names):
                promised[name] = chain[index * self.block_size : (index + 1) * self.block_size]
        for name, block in memory._cache._block_by_hash.items():
            assert self.device[block] == promised[name], "a cached block holds something else"
        for name, slot in memory._host._slot_by_hash.items():
            assert self.host[slot] == promised[name], "a host block holds something else"

    def _copy(self, pairs, source, target):
        assert len({end for _, end in pairs}) == len(pairs), "two copies into one block"
        contents = [list(source[start]) for start, _ in pairs]
        for content, (_, end) in zip(contents, pairs, strict=True):
            assert None not in content, "a block that was never filled is copied"
            target[end] = content

    def _check_writes(self, plan):
        """No block that is written is in two tables."""
        holders = {}
        for planned in plan.sequences:
            for block in planned.block_table:
                holders[block] = holders.get(block, 0) + 1
        for planned in plan.sequences:
            for block in planned.block_table[planned.start // self.block_size :]:
                assert holders[block] == 1, "a shared block is written"
