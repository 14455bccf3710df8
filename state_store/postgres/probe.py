"""The smallest question to Postgres, on a connection of its own: a pool whose connections are all busy is no outage."""

import psycopg


class PostgresProbe:
    """Callable; keeps its connection between questions. Raises psycopg.Error."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.AsyncConnection[tuple[int]] | None = None

    async def __call__(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        try:
            await connection.execute("SELECT 1")
        except BaseException:
            await connection.close()
            raise
        if self._connection is not None:  # of a probe that was given up and answered after all
            await connection.close()
        else:
            self._connection = connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
