"""The protocol of targets, on the driver and in tasks."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from delayline.bulk.cold_catalog import ColdFile
from delayline.bulk.staging import Attempt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack
    from datetime import timedelta

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Staged(NamedTuple):
    """The deliveries of one session, for the driver to commit."""

    attempt: Attempt
    files: Sequence[ColdFile] = ()
    noted: Sequence[Attempt] = ()
    """The messages in the files, for the store's journal."""

    @property
    def rows(self) -> int:
        """How many messages it are."""
        return self.attempt.rows + sum(one.messages for one in self.files)

    @property
    def text(self) -> str:
        """It as text, for a column."""
        return json.dumps(self)

    @classmethod
    def of(cls, text: str) -> Staged:
        """Parse the text of `dumps`."""
        attempt, files, noted = json.loads(text)
        return cls(Attempt(*attempt), [ColdFile(*one) for one in files], [Attempt(*one) for one in noted])


class Attempted(NamedTuple):
    """One attempt at a batch."""

    name: str
    """The batch's, for a target that keeps a ledger."""
    number: int
    foretell: Callable[[Mapping[int, str]], Awaitable[None]]
    """Writes down why some messages are not taken, by position: to be awaited before the others count for good."""


class Delivered(NamedTuple):
    """The result of a batch."""

    attempt: int
    """The one that counts: this one, or one before of which nobody had heard."""
    refused: Mapping[int, str] = MappingProxyType({})
    """Why some messages were not taken, by position, as far as that was not foretold."""


class DeliverySession(Protocol):
    """One task's way to the target."""

    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Hand over the messages; any failure but those of single messages is raised."""
        ...

    async def end(self) -> Sequence[Staged]:
        """Return the deliveries that the driver has to commit; none if the target has committed them."""
        ...


class DeliveryRound(Protocol):
    """Some batches of one endpoint that go together; pickled to tasks."""

    largest_message: int
    """Bytes that headers and body may have together."""
    confirms: bool
    """Whether delivered messages are durable at once, so that their batch can be marked."""

    async def session(self, stack: AsyncExitStack) -> DeliverySession:
        """Return an open session that closes with the stack."""
        ...

    def commit(self, staged: Sequence[Staged], attempts: Mapping[str, int]) -> None:
        """Commit the messages of these attempts under the names of their batches, all or none."""
        ...

    def discard(self) -> None:
        """Remove deliveries that were not committed."""
        ...


class Target(Protocol):
    """One back end that messages are moved to. Every method blocks, and but for `begin` changes nothing."""

    kind: ClassVar[str]
    exactly_once: ClassVar[bool]
    """Whether a batch that is delivered again leaves no second copy."""
    longest: ClassVar[timedelta | None]
    """How long a message may wait there at most; None for as long as it likes."""
    grain: ClassVar[timedelta]
    """The resolution to which the target rounds due times up."""

    @property
    def largest_message(self) -> int:
        """How many bytes headers and body may have together."""
        ...

    def __str__(self) -> str:
        """Return the target's kind and address, without secrets."""
        ...

    def endpoint_named(self, name: str) -> str:
        """Return the target's name for the endpoint. Raises BackendUnusable if it is not set up for it."""
        ...

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return why messages for some of these could not go there."""
        ...

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame | None:
        """Return id, destination and due time of the endpoint's pending messages; None if they cannot be listed."""
        ...

    def begin(self, endpoint: str) -> DeliveryRound:
        """Return a new wave for that endpoint, under the target's name for it."""
        ...

    def committed(self, endpoint: str, names: Sequence[str]) -> Mapping[str, int]:
        """Return the counting attempts of committed batches; none if the target has no ledger."""
        ...

    def close(self, endpoint: str, names: Sequence[str]) -> None:
        """Let no task commit these batches from now on, if that can be; those that are committed are."""
        ...


class WithoutLedger:
    """A target that knows messages and no batches: these are marked one by one as it has them."""

    def committed(self, endpoint: str, names: Sequence[str]) -> Mapping[str, int]:
        """Return nothing."""
        del endpoint, names
        return {}

    def close(self, endpoint: str, names: Sequence[str]) -> None:
        """Do nothing."""


class ConfirmingRound:
    """Batches that are at the target for good when a session has delivered them."""

    confirms = True

    def commit(self, staged: Sequence[Staged], attempts: Mapping[str, int]) -> None:
        """Do nothing: it is all there."""

    def discard(self) -> None:
        """No-op: the target has committed its deliveries."""


class ConfirmingSession:
    """One task's way to such a target."""

    async def end(self) -> Sequence[Staged]:
        """Return nothing for a driver to commit: it is all there."""
        return ()
