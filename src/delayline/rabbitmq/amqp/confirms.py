"""Publications on a channel until they are settled: confirmed, returned or refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from delayline.rabbitmq.amqp.errors import NotTaken, Returned
from delayline.rabbitmq.amqp.wire import Publication

if TYPE_CHECKING:
    from collections.abc import Sequence

AnyPublication = TypeVar("AnyPublication", bound=Publication)


class PublishBatch(Generic[AnyPublication]):
    """The publications of a caller: which are settled, and how."""

    __slots__ = ("failures", "left", "not_taken", "over", "publications", "settled")

    def __init__(self, publications: Sequence[AnyPublication]) -> None:
        self.publications: Sequence[AnyPublication] = publications
        self.left: int = len(publications)
        self.failures: dict[int, Exception] = {}
        self.over: list[int] = []
        """Positions whose channel was closed before they were settled."""
        self.not_taken: list[int] = []
        """Positions that a queue refused: it is full, or has no leader now."""
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, number: int) -> None:
        """Count so many positions; the last ends the wait."""
        self.left -= number
        if self.left == 0 and not self.settled.done():
            self.settled.set_result(None)

    def wait_again(self) -> None:
        """Begin another wait after a cancelled wait."""
        if self.settled.cancelled():
            self.settled = asyncio.get_running_loop().create_future()
            if self.left == 0:
                self.settled.set_result(None)

    def refuse(self, position: int, error: Exception) -> None:
        """Keep why a position that will not be sent, or was refused, failed."""
        self.failures[position] = error

    def lose(self, error: Exception) -> None:
        """End the wait: the connection is lost, and with it the answers."""
        if not self.settled.done():
            self.settled.set_exception(error)
            self.settled.exception()  # its caller may be gone


class ConfirmRange(NamedTuple):
    """Publications of a batch that were written in a row: positions and sequence numbers go together."""

    batch: PublishBatch[Any]
    positions: Sequence[int]
    first: int

    def position(self, sequence: int) -> int:
        """Return the position in the batch of the publication with that number."""
        return self.positions[sequence - self.first]


class Confirms:
    """The outstanding publications of a channel, by the sequence number that the broker counts them with."""

    def __init__(self) -> None:
        self._outstanding: dict[int, ConfirmRange] = {}
        self.answers: int = 0
        """How many answers the broker has given."""
        self.refused: bool = False
        """Whether one of them was a refusal."""
        self._lowest = 1
        self._next = 1
        self._returned_up_to = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._outstanding)

    def wrote(self, batch: PublishBatch[Any], positions: Sequence[int]) -> None:
        """Expect an answer for each publication, written in this order."""
        run = ConfirmRange(batch, positions, self._next)
        if not self._outstanding:
            self._empty.clear()
        self._next += len(positions)
        for sequence in range(run.first, self._next):
            self._outstanding[sequence] = run

    def settle(self, tag: int, *, multiple: bool, acknowledged: bool) -> None:
        """Take the broker's answer to a publication, or to all up to it. Raises ValueError for unwritten numbers."""
        if not 0 < tag < self._next:
            raise ValueError(f"it confirms message {tag} of {self._next - 1} on a channel")
        outstanding = self._outstanding
        self.answers += 1
        self.refused = self.refused or not acknowledged
        if multiple:
            sequences: Sequence[int] = range(self._lowest, tag + 1)
            self._lowest = max(self._lowest, tag + 1)
        else:
            sequences = (tag,)
        for sequence in sequences:
            run = outstanding.pop(sequence, None)
            if run is not None:
                if not acknowledged:
                    position = run.position(sequence)
                    run.batch.refuse(position, NotTaken())
                    run.batch.not_taken.append(position)
                run.batch.settle(1)
        while self._lowest < self._next and self._lowest not in outstanding:
            self._lowest += 1
        if not outstanding:
            self._empty.set()

    def returned(self, exchange: str, routing_key: str, message_id: str | None, reason: str) -> bool:
        """Mark an unroutable publication; its confirm follows. False for an unknown publication.

        Returns come in the order of publishing, so each search begins behind the last find.
        """
        for sequence in range(max(self._returned_up_to + 1, self._lowest), self._next):
            run = self._outstanding.get(sequence)
            if run is None:
                continue
            position = run.position(sequence)
            publication = run.batch.publications[position]
            if (
                publication.routing_key == routing_key
                and publication.exchange == exchange
                and publication.message_id in (None, message_id)
            ):
                self._returned_up_to = sequence
                run.batch.refuse(position, Returned(reason))
                return True
        return False

    def abandon(self) -> None:
        """Fail the unsettled publications of a closed channel: they may or may not have arrived."""
        for sequence, run in self._outstanding.items():
            position = run.position(sequence)
            if position not in run.batch.failures:
                run.batch.over.append(position)
            run.batch.settle(1)
        self._forget()

    def lose(self, error: Exception) -> None:
        """Fail every batch with something outstanding, when the connection is gone."""
        for run in self._outstanding.values():
            run.batch.lose(error)
        self._forget()

    async def empty(self) -> None:
        """Return when nothing is outstanding."""
        await self._empty.wait()

    def _forget(self) -> None:
        self._outstanding.clear()
        self._empty.set()
