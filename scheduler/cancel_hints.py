"""Tells the other schedulers that generations were cancelled whose worker is not served here.

A hint is only a reason to look: the cause stands in Postgres, and a scheduler that misses the hint finds it there at its
next comparison. So nothing is kept, repeated or acknowledged.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from service_kit.ids import GenerationId


class CancelHints(Protocol):
    """Between all schedulers of an installation."""

    async def publish(self, generation_ids: Sequence[GenerationId]) -> None:
        """Raises UnavailableError; then nobody may have heard it."""

    def follow(self) -> AsyncGenerator[list[GenerationId], None]:
        """Endless: what is published from now on, one's own included. What is published while the connection is away is
        missed."""


class NoCancelHints:
    """`CancelHints` of a scheduler that is alone."""

    async def publish(self, generation_ids: Sequence[GenerationId]) -> None:
        del generation_ids

    async def follow(self) -> AsyncGenerator[list[GenerationId], None]:
        return
        yield []
