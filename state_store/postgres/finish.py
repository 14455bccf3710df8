"""Ends and output: final states with everything that rests on them, and chunk rows of attempts that go on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from service_kit.delta import ChainMismatchError, Cursor, Delta, join
from service_kit.ids import GenerationId
from service_kit.logprob_codec import pack_logprobs
from state_store.decisions import REQUEST_KEY_KEPT, decide_finish, missing_output, output_to_finish, storable
from state_store.model import Finish, State
from state_store.ports import ChunkWrite, FinishKind, FinishResult
from state_store.postgres import rows, statements
from state_store.postgres.attempts import Records, by_id, get_records, known_ids, lock_generations
from state_store.postgres.pool import PostgresPart, Transaction
from state_store.postgres.rows import LockedGeneration, to_signed

Chunk = tuple[GenerationId, Delta]
Outputs = dict[GenerationId, Delta]


class PostgresFinish(PostgresPart):
    """The part of GenerationStore that ends generations and stores their output."""

    async def finish_many(self, items: Sequence[Finish], *, now: datetime | None = None) -> list[FinishResult]:
        async def work(transaction: Transaction) -> list[FinishResult]:
            heads = await lock_generations(transaction, (item.generation_id for item in items))
            stored = await _read_stored(transaction, [(item.generation_id, item.output) for item in items])
            kinds: list[FinishKind] = []
            finished: list[tuple[Finish, LockedGeneration]] = []
            chunks: list[Chunk] = []
            for item in items:
                head = heads.get(item.generation_id)
                kind, rest = _decide(item, head, stored)
                kinds.append(kind)
                if kind is FinishKind.FINISHED and head is not None:
                    finished.append((item, head))
                    chunks.extend([(item.generation_id, rest)] if rest is not None else [])
                    heads[item.generation_id] = replace(head, state=item.state)
            records = await _finish(transaction, finished, chunks, now)
            ended_before = [
                item.generation_id
                for item, kind in zip(items, kinds, strict=True)
                if kind is FinishKind.ALREADY_FINISHED and item.generation_id not in records
            ]
            records |= await get_records(transaction, ended_before)
            is_known = (FinishKind.FINISHED, FinishKind.ALREADY_FINISHED)
            return [
                FinishResult(kind=kind, record=records[item.generation_id] if kind in is_known else None)
                for item, kind in zip(items, kinds, strict=True)
            ]

        return await self._database.transact(work) if items else []

    async def store_chunks_many(self, items: Sequence[ChunkWrite]) -> list[bool]:
        async def work(transaction: Transaction) -> list[bool]:
            heads = await lock_generations(transaction, (item.generation_id for item in items))
            stored = await _read_stored(transaction, [(item.generation_id, item.output) for item in items])
            answers: list[bool] = []
            chunks: list[Chunk] = []
            for item in items:
                head = heads.get(item.generation_id)
                is_current = head is not None and head.state is State.RUNNING and head.attempt == item.attempt
                answers.append(is_current and _add_chunk(item, stored, chunks))
            await _insert_chunks(transaction, chunks)
            return answers

        return await self._database.transact(work) if items else []

    async def read_output_many(self, generation_ids: Sequence[GenerationId]) -> list[Delta | None]:
        found = await self._database.fetch(statements.READ_OUTPUT, {"generation_ids": known_ids(generation_ids)})
        outputs = _joined(found)
        return [outputs.get(generation_id) for generation_id in generation_ids]

    async def stored_ends_many(self, generation_ids: Sequence[GenerationId]) -> list[Cursor]:
        found = await self._database.fetch(statements.STORED_ENDS, {"generation_ids": known_ids(generation_ids)})
        ends = {GenerationId(str(row["generation_id"])): rows.chunk_end(row) for row in found}
        return [ends.get(generation_id, Cursor()) for generation_id in generation_ids]


class _Stored:
    """Stored ends, kept up to date while the items of one batch are decided, and stored outputs where a decision needs
    them: an item's output that ends before the stored one is compared with it."""

    def __init__(self, ends: dict[GenerationId, Cursor], outputs: Outputs) -> None:
        self._ends = ends
        self._outputs = outputs

    def end(self, generation_id: GenerationId) -> Cursor:
        return self._ends.get(generation_id, Cursor())

    def output(self, generation_id: GenerationId) -> Delta | None:
        return self._outputs.get(generation_id)

    def add(self, generation_id: GenerationId, rest: Delta) -> None:
        before = self._outputs.get(generation_id)
        self._ends[generation_id] = rest.end
        self._outputs[generation_id] = join([before, rest]) or rest if before is not None else rest


async def _read_stored(transaction: Transaction, wanted: Sequence[tuple[GenerationId, Delta | None]]) -> _Stored:
    ids = known_ids(generation_id for generation_id, _ in wanted)
    found = await transaction.fetch(statements.STORED_ENDS, {"generation_ids": ids})
    ends = {GenerationId(str(row["generation_id"])): rows.chunk_end(row) for row in found}
    named = [generation_id for generation_id, _ in wanted]
    compared = {
        generation_id
        for generation_id, output in wanted
        if output is not None
        and (output.last < ends.get(generation_id, Cursor()).sequence_number or named.count(generation_id) > 1)
    }
    if not compared:
        return _Stored(ends, {})
    found = await transaction.fetch(statements.READ_OUTPUT, {"generation_ids": sorted(compared)})
    return _Stored(ends, _joined(found))


def _joined(found: Iterable[rows.Row]) -> Outputs:
    parts: dict[GenerationId, list[Delta]] = {}
    for row in found:
        parts.setdefault(GenerationId(str(row["generation_id"])), []).append(rows.chunk(row))
    joined = {generation_id: join(deltas) for generation_id, deltas in parts.items()}
    return {generation_id: delta for generation_id, delta in joined.items() if delta is not None}


def _decide(item: Finish, head: LockedGeneration | None, stored: _Stored) -> tuple[FinishKind, Delta | None]:
    kind = decide_finish(item, head)
    if kind is not FinishKind.FINISHED:
        return kind, None
    try:
        rest = output_to_finish(item, stored.end(item.generation_id), lambda: stored.output(item.generation_id))
    except ChainMismatchError:
        return FinishKind.INCOMPLETE, None
    return kind, rest


def _add_chunk(item: ChunkWrite, stored: _Stored, chunks: list[Chunk]) -> bool:
    end = stored.end(item.generation_id)
    try:
        rest = missing_output(item.output, end, lambda: stored.output(item.generation_id))
    except ChainMismatchError:
        return False
    if rest is not None:
        stored.add(item.generation_id, rest)
        chunks.append((item.generation_id, rest))
    return True


async def _insert_chunks(transaction: Transaction, chunks: Sequence[Chunk]) -> None:
    if not chunks:
        return
    texts = [rows.pack_texts(delta.texts) for _, delta in chunks]
    parameters = {
        "generation_ids": [generation_id for generation_id, _ in chunks],
        "firsts": [delta.first for _, delta in chunks],
        "lasts": [delta.last for _, delta in chunks],
        "token_ids": [rows.pack_token_ids(delta.token_ids) for _, delta in chunks],
        "texts": [packed for packed, _ in texts],
        "text_ends": ["{" + ",".join(map(str, ends)) + "}" for _, ends in texts],
        "prev_chains": [to_signed(delta.prev_chain) for _, delta in chunks],
        "chains": [to_signed(delta.chain) for _, delta in chunks],
        "logprobs": [pack_logprobs(delta.logprobs) if delta.logprobs else None for _, delta in chunks],
    }
    await transaction.send(statements.INSERT_CHUNKS, parameters)


async def _finish(
    transaction: Transaction,
    finished: Sequence[tuple[Finish, LockedGeneration]],
    chunks: Sequence[Chunk],
    now: datetime | None,
) -> Records:
    if not finished:
        return {}
    names = {
        "tenant_ids": [head.tenant_id for _, head in finished],
        "request_ids": [head.request_id for _, head in finished],
    }
    await transaction.send(statements.LOCK_REQUEST_KEYS, names)
    await _insert_chunks(transaction, chunks)
    found = await transaction.fetch(statements.FINISH, _finish_columns([item for item, _ in finished], now))
    return by_id(found)


def _finish_columns(items: Sequence[Finish], now: datetime | None) -> dict[str, object]:
    return {
        "generation_ids": [item.generation_id for item in items],
        "from_states": [item.from_state.value for item in items],
        "attempts": [item.attempt for item in items],
        "states": [item.state.value for item in items],
        "output_tokens": [item.output_tokens for item in items],
        "cached_prompt_tokens": [item.cached_prompt_tokens for item in items],
        "finish_reasons": [item.finish_reason.value if item.finish_reason is not None else None for item in items],
        "matched_stops": [storable(item.matched_stop) for item in items],
        "error_reasons": [storable(item.error_reason) for item in items],
        "error_messages": [storable(item.error_message) for item in items],
        "key_kept": REQUEST_KEY_KEPT,
        "now": now,
    }
