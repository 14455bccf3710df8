"""One client's stream: the reader, fed by the hub, the log and the store, as an iterator of pieces to send."""

import asyncio
from collections.abc import AsyncGenerator
from typing import assert_never

from gateway.config import StreamLimits
from gateway.streaming.hub import StreamHub
from gateway.streaming.pieces import Piece, cut_pieces
from gateway.streaming.reader import CursorBeyondEndError, Need, OutputMissingError, OutputReader
from gateway.streaming.subscription import News, Subscription
from service_kit.delta import ChainMismatchError, Cursor, Delta
from service_kit.errors import DataLossError, NotFoundError, OutOfRangeError, Reason, UnavailableError
from service_kit.ids import GenerationId
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogReader, LogView, Push
from state_store.model import GenerationRecord
from state_store.ports import GenerationStore

_log = get_logger()


class StreamOpener:
    """Makes streams; holds what they share."""

    def __init__(self, *, hub: StreamHub, log: DeltaLogReader, store: GenerationStore, limits: StreamLimits) -> None:
        self._hub = hub
        self._delta_log = log
        self._store = store
        self._limits = limits

    async def stream(self, generation_id: GenerationId, cursor: Cursor) -> AsyncGenerator[Piece, None]:
        """Everything behind `cursor`, in order; the last piece has the end.

        Raises DataLossError, OutOfRangeError, and UnavailableError when the gateway drains. A log or store that cannot be
        reached is waited for: the stream stands still, and goes on or ends with what either of them says later.
        """
        subscription = self._hub.open(generation_id, cursor)
        reader = OutputReader(cursor)
        try:
            view = await self._hub.attach(subscription)
            forward = reader.take_view(view) if view is not None else _wait_for_news(reader)
            while True:
                for piece in cut_pieces(
                    forward, end=_reached_end(reader), max_tokens=self._limits.max_tokens_per_message
                ):
                    yield piece
                    # Only what the client's connection took counts: the hub asks the log from here on.
                    subscription.cursor = piece.cursor
                if reader.need is Need.NOTHING:
                    return
                forward = await self._read_more(reader, subscription)
        except ChainMismatchError as error:
            _log.warning("output_contradicts_cursor", generation_id=generation_id, error=str(error))
            raise DataLossError(f"{error}: it does not continue the given cursor") from error
        except CursorBeyondEndError as error:
            raise OutOfRangeError(str(error)) from error
        except OutputMissingError as error:
            raise OutOfRangeError(str(error), reason=Reason.OUTPUT_NOT_KEPT) from error
        finally:
            self._hub.close(subscription)

    async def _read_more(self, reader: OutputReader, subscription: Subscription) -> list[Delta]:
        generation_id = subscription.generation_id
        match reader.need:
            case Need.NEWS:
                return _take(reader, await subscription.next())
            case Need.LOG | Need.RECORD:
                try:
                    return await self._look(reader, generation_id)
                except UnavailableError:
                    # The hub attaches again when it can, and checks the row meanwhile: wait for what it finds.
                    subscription.is_attached = False
                    reader.need = Need.NEWS
                    return []
            case Need.STORED_OUTPUT:
                return await self._read_stored_output(reader, subscription)
            case Need.NOTHING:
                raise AssertionError("the stream is over")
            case _:
                assert_never(reader.need)

    async def _look(self, reader: OutputReader, generation_id: GenerationId) -> list[Delta]:
        if reader.need is Need.LOG:
            (view,) = await self._delta_log.read_many([(generation_id, reader.cursor.sequence_number)])
            return reader.take_view(view)
        (record,) = await self._store.get_many([generation_id])
        if record is None:
            raise NotFoundError("no such generation")
        return reader.take_record(record)

    async def _read_stored_output(self, reader: OutputReader, subscription: Subscription) -> list[Delta]:
        """Only the store has it: a store that is away is asked again after a silence."""
        try:
            (output,) = await self._store.read_output_many([subscription.generation_id])
        except UnavailableError as error:
            _log.warning("stream_waits_for_store", generation_id=subscription.generation_id, error=str(error))
            await asyncio.sleep(self._limits.silence.total_seconds())
            subscription.raise_failure()
            return []
        return reader.take_stored_output(output)


def _reached_end(reader: OutputReader) -> Piece | None:
    if reader.need is not Need.NOTHING:
        return None
    return Piece(cursor=reader.cursor, end=reader.end)


def _wait_for_news(reader: OutputReader) -> list[Delta]:
    """The log is away: go on with whatever the hub finds."""
    reader.need = Need.NEWS
    return []


def _take(reader: OutputReader, news: News | None) -> list[Delta]:
    match news:
        case None:
            reader.mark_behind()
            return []
        case Push():
            return reader.take_push(news)
        case LogView():
            return reader.take_view(news)
        case GenerationRecord():
            return reader.take_record(news)
