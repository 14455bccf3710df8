"""`sluice queue`: what waits, for how long, and what is on its way to a worker."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from redis.asyncio import Redis

from scheduler.queue.redis_queue import RedisAdmissionQueue
from sluice.commands.database import Dsn
from sluice.commands.redis import RedisUrl, with_stores
from sluice.listing import Format, write_rows
from sluice.queue_overview import COLUMNS, SHOWN, Row, read_queue
from state_store.postgres.store import PostgresStore

QUEUE_EXAMPLES = """Examples:\n
\b
  sluice queue
  sluice queue --model smollm2-135m-instruct --format json
"""


def queue_command(
    *,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TABLE,
    dsn: Dsn = None,
    redis_url: RedisUrl = None,
) -> None:
    """Depth of the queue by model and class: in the index (queued) and in the record (committed), and the longest wait."""

    async def work(store: PostgresStore, redis: Redis) -> list[Row]:
        return await read_queue(store, RedisAdmissionQueue(redis), model=model, now=datetime.now(tz=UTC))

    write_rows(COLUMNS, with_stores(dsn, redis_url, work), form, shown=SHOWN, empty="nothing waits")
