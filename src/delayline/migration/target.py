"""The protocol of targets, on the driver and in tasks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from delayline.bulk.batches import BatchName
from delayline.bulk.cold_catalog import ColdFile
from delayline.bulk.writer import Attempt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack
    from datetime import timedelta

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Staged(NamedTuple):
    """The deliveries of a session, for the driver to commit."""

    attempt: Attempt
    files: Sequence[ColdFile] = ()

    @property
    def rows(self) -> int:
        """How many messages it are."""
        return self.attempt.rows + sum(file.messages for file in self.files)

    @property
    def text(self) -> str:
        """The deliveries as text, for a column."""
        return json.dumps(self)

    @classmethod
    def of(cls, text: str) -> Staged:
        """Parse the text of `dumps`."""
        attempt, files = json.loads(text)
        return cls(Attempt(*attempt), [ColdFile(*file) for file in files])


class Attempted(NamedTuple):
    """An attempt at a batch."""

    name: BatchName
    """The batch's, for a target that keeps a ledger."""
    number: int
    record_refusals: Callable[[Mapping[int, str]], Awaitable[None]]
    """Records the reasons of refused messages, by position. Await it before the other messages are committed."""


class Delivered(NamedTuple):
    """The result of a batch."""

    attempt: int
    """The attempt that counts: this one, or an earlier one whose commit was not confirmed."""
    refused: Mapping[int, str] = MappingProxyType({})
    """Reasons of refused messages, by position, unless `record_refusals` has recorded them."""


class DeliverySession(ABC):
    """Some batches of an endpoint that are delivered together: pickled to tasks, which open it and deliver.

    `end`, `commit` and `discard` are for a target that has committed a batch when `deliver` returns.
    """

    confirms: bool = True
    """Whether delivered messages are durable at once, so that their batch can be marked."""
    largest_message: int
    """Bytes that headers and body may have together."""

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> None:
        """Connect, in a task; the connections close with the stack."""

    @abstractmethod
    async def deliver(self, messages: pa.RecordBatch, attempt: Attempted) -> Delivered:
        """Hand over the messages; any failure except of single messages is raised."""

    async def end(self) -> Sequence[Staged]:
        """Return the deliveries that the driver has to commit; none if the target has committed them."""
        return ()

    def commit(self, staged: Sequence[Staged], attempts: Mapping[BatchName, int]) -> None:  # noqa: B027 - see the class
        """Commit the messages of the attempts under the names of their batches, all or none."""

    def discard(self) -> None:  # noqa: B027 - see the class
        """Remove deliveries that were not committed."""


class TargetLimits(Protocol):
    """The limits of a back end that messages are moved to."""

    @property
    def longest(self) -> timedelta | None:
        """The longest delay of a pending message; None for no limit."""
        ...

    @property
    def grain(self) -> timedelta:
        """The resolution to which the target rounds due times up."""
        ...

    @property
    def largest_message(self) -> int:
        """How many bytes headers and body may have together."""
        ...


class Target(TargetLimits, Protocol):
    """A back end that messages are moved to. Every method blocks, and but for `begin` changes nothing."""

    kind: ClassVar[str]
    exactly_once: ClassVar[bool]
    """Whether a batch that is delivered again leaves no second copy."""

    def __str__(self) -> str:
        """Return the target's kind and address, without secrets."""
        ...

    def endpoint_named(self, name: str) -> str:
        """Return the target's name for the endpoint. Raises BackendUnusable if it is not set up for it."""
        ...

    def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the reasons why the target cannot have messages for some of the destinations."""
        ...

    def waiting(self, endpoint: str, spark: SparkSession) -> DataFrame | None:
        """Return id, destination and due time of the endpoint's pending messages; None if they cannot be listed."""
        ...

    def begin(self, endpoint: str) -> DeliverySession:
        """Return a new session for the endpoint, given its name at the target."""
        ...

    def committed(self, endpoint: str, names: Sequence[BatchName]) -> Mapping[BatchName, int]:
        """Return the counting attempts of committed batches; none if the target has no ledger."""
        ...

    def close(self, endpoint: str, names: Sequence[BatchName]) -> None:
        """Prevent later commits of the batches, if the target can; committed batches are unaffected."""
        ...


class WithoutLedger:
    """A target without a ledger of batches: each is marked once the target has confirmed its messages."""

    def committed(self, endpoint: str, names: Sequence[BatchName]) -> Mapping[BatchName, int]:
        """Return nothing."""
        del endpoint, names
        return {}

    def close(self, endpoint: str, names: Sequence[BatchName]) -> None:
        """Do nothing."""
