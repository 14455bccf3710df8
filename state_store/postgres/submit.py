"""Submitting generations: one statement commits keys and rows, a second finds what the other request ids stand for."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from service_kit.ids import GenerationId, RequestId, TenantId
from state_store.decisions import queued_record
from state_store.errors import StoreUnavailableError
from state_store.model import GenerationRecord, NewGeneration
from state_store.ports import SubmitKind, SubmitResult
from state_store.postgres import rows, statements
from state_store.postgres.pool import PostgresPart

_MAX_ROUNDS = 3
_Name = tuple[TenantId, RequestId]
_Named = dict[_Name, tuple[bytes, GenerationRecord]]


class PostgresSubmit(PostgresPart):
    """The submitting part of GenerationStore."""

    async def submit_many(self, items: Sequence[NewGeneration], *, now: datetime | None = None) -> list[SubmitResult]:
        results: dict[int, SubmitResult] = {}
        for _ in range(_MAX_ROUNDS):
            rest = [(index, item) for index, item in enumerate(items) if index not in results]
            if not rest:
                break
            results.update(await self._submit_round(rest, now))
        if len(results) < len(items):
            raise StoreUnavailableError("request ids expired and were taken again, over and over")
        return [results[index] for index in range(len(items))]

    async def _submit_round(
        self, items: Sequence[tuple[int, NewGeneration]], now: datetime | None
    ) -> dict[int, SubmitResult]:
        """Answers all items but those whose request id went away between the two statements."""
        first_writers = _first_writers(items)
        created = await self._insert([item for _, item in first_writers], now)
        results = {
            index: SubmitResult(kind=SubmitKind.CREATED, record=queued_record(item, created[item.generation_id]))
            for index, item in first_writers
            if item.generation_id in created
        }
        others = [(index, item) for index, item in items if index not in results]
        if others:
            found = await self.attach_many([item for _, item in others], now=now)
            results.update(
                {index: result for (index, _), result in zip(others, found, strict=True) if result is not None}
            )
        return results

    async def attach_many(
        self, items: Sequence[NewGeneration], *, now: datetime | None = None
    ) -> list[SubmitResult | None]:
        # Most are new, which is found out cheaply: the look for a name's generation goes into every partition.
        if not await self._has_known(items, now):
            return [None] * len(items)
        named = await self._find_named(items, now)
        taken = await self._find_taken([item for item in items if _name(item) not in named])
        return [_existing(item, named, taken) for item in items]

    async def _has_known(self, items: Sequence[NewGeneration], now: datetime | None) -> bool:
        parameters = {**_names_of(items, now), "generation_ids": [item.generation_id for item in items]}
        found = await self._database.fetch(statements.HAS_KNOWN, parameters)
        return bool(found[0]["has_any"])

    async def _insert(self, items: Sequence[NewGeneration], now: datetime | None) -> dict[GenerationId, datetime]:
        found = await self._database.fetch(statements.SUBMIT, {**_columns(items), "now": now})
        return {GenerationId(str(row["generation_id"])): row["created_at"] for row in found}

    async def _find_named(self, items: Sequence[NewGeneration], now: datetime | None) -> _Named:
        found = await self._database.fetch(statements.FIND_BY_REQUEST_IDS, _names_of(items, now))
        return {(row["tenant_id"], row["request_id"]): (row["key_hash"], rows.generation(row)) for row in found}

    async def _find_taken(self, items: Sequence[NewGeneration]) -> dict[GenerationId, GenerationRecord]:
        if not items:
            return {}
        parameters = {"generation_ids": [item.generation_id for item in items]}
        found = [rows.generation(row) for row in await self._database.fetch(statements.GET, parameters)]
        return {record.generation_id: record for record in found}


def _name(item: NewGeneration) -> _Name:
    return (item.tenant_id, item.request_id)


def _names_of(items: Sequence[NewGeneration], now: datetime | None) -> dict[str, object]:
    return {
        "tenant_ids": [item.tenant_id for item in items],
        "request_ids": [item.request_id for item in items],
        "now": now,
    }


def _first_writers(items: Sequence[tuple[int, NewGeneration]]) -> list[tuple[int, NewGeneration]]:
    """One item per request id and generation id, the first; in the order in which every batch takes its key locks."""
    by_name: dict[_Name, tuple[int, NewGeneration]] = {}
    generation_ids: set[GenerationId] = set()
    for index, item in items:
        if _name(item) not in by_name and item.generation_id not in generation_ids:
            by_name[_name(item)] = (index, item)
            generation_ids.add(item.generation_id)
    return [by_name[name] for name in sorted(by_name)]


def _existing(item: NewGeneration, named: _Named, taken: dict[GenerationId, GenerationRecord]) -> SubmitResult | None:
    if _name(item) in named:
        request_hash, record = named[_name(item)]
        kind = SubmitKind.EXISTING if request_hash == item.request_hash else SubmitKind.CONFLICT
        return SubmitResult(kind=kind, record=record)
    if item.generation_id in taken:
        return SubmitResult(kind=SubmitKind.CONFLICT, record=taken[item.generation_id])
    return None


def _columns(items: Sequence[NewGeneration]) -> dict[str, list[Any]]:
    return {
        "generation_ids": [item.generation_id for item in items],
        "tenant_ids": [item.tenant_id for item in items],
        "key_ids": [item.key_id for item in items],
        "request_ids": [item.request_id for item in items],
        "request_hashes": [item.request_hash for item in items],
        "requeue_ofs": [item.requeue_of for item in items],
        "models": [item.model for item in items],
        "revisions": [item.model_key.revision for item in items],
        "precisions": [item.model_key.precision for item in items],
        "classes": [item.priority_class.value for item in items],
        "prompts": [rows.pack_token_ids(item.prompt_token_ids) for item in items],
        "samplings": [json.dumps(item.sampling.to_dict()) for item in items],
        "graces": [item.grace for item in items],
        "queue_timeouts": [item.queue_timeout for item in items],
        "deadlines": [item.deadline for item in items],
        "traceparents": [item.traceparent for item in items],
        "stored": [item.is_stored for item in items],
    }
