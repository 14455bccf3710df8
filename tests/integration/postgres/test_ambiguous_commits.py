"""The connection is lost at the moment of a commit: nobody knows whether it took effect. The same call again finds out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import pytest

from state_store.errors import StoreUnavailableError
from state_store.model import State
from state_store.ports import FinishKind, GrantKind, SubmitKind
from state_store.postgres.store import PostgresStore
from tests.support.generations import finish_of, grant_request, new_generation, opened, running, submitted
from tests.support.lossy_link import LossyLink, lossy_link


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """`store` reaches Postgres through `link`, `sure` directly."""

    store: PostgresStore
    sure: PostgresStore
    link: LossyLink


@pytest.fixture
async def rig(emptied_postgres_store: PostgresStore, store_admin: str) -> AsyncIterator[Rig]:
    parts = urlsplit(store_admin)
    assert parts.port is not None
    async with lossy_link(parts.port) as link:
        netloc = f"{parts.netloc.rsplit('@', 1)[0]}@127.0.0.1:{link.port}"
        store = PostgresStore(urlunsplit(parts._replace(netloc=netloc)))
        await store.open()
        yield Rig(store=store, sure=emptied_postgres_store, link=link)
        await store.close()


async def test_a_submit_whose_answer_was_lost_attaches_when_it_is_repeated(rig: Rig) -> None:
    new = new_generation()
    rig.link.fatal = b"INSERT INTO request_keys"
    with pytest.raises(StoreUnavailableError):
        await rig.store.submit_many([new])
    assert rig.link.num_lost == 1
    (again,) = await rig.store.submit_many([new])
    assert (again.kind, again.record.generation_id) == (SubmitKind.EXISTING, new.generation_id)


async def test_a_finish_whose_commit_was_not_heard_of_is_final_once_when_it_is_repeated(rig: Rig) -> None:
    record = await running(rig.sure)
    rig.link.fatal = b"COMMIT"
    with pytest.raises(StoreUnavailableError):
        await rig.store.finish_many([finish_of(record)])
    assert rig.link.num_lost == 1
    (again,) = await rig.store.finish_many([finish_of(record)])
    assert again.kind is FinishKind.ALREADY_FINISHED
    assert again.record is not None
    assert again.record.state is State.SUCCEEDED
    assert len(await rig.sure.ledger_of(record.generation_id)) == 1


async def test_a_grant_whose_commit_was_not_heard_of_is_one_attempt_when_it_is_repeated(rig: Rig) -> None:
    record, session_id = await submitted(rig.sure), await opened(rig.sure)
    request = grant_request(record, session_id)
    rig.link.fatal = b"COMMIT"
    with pytest.raises(StoreUnavailableError):
        await rig.store.grant_many([request])
    assert rig.link.num_lost == 1
    (again,) = await rig.store.grant_many([request])
    assert again.kind is GrantKind.NOT_QUEUED
    (attempt,) = await rig.sure.attempts_of(record.generation_id)
    assert (attempt.attempt, attempt.session_id) == (1, session_id)
    assert [row.generation_id for row in await rig.sure.running_of([session_id])] == [record.generation_id]
