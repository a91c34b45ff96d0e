"""Back ends by URL scheme: each answers for itself what is made there, set up and counted, and what cannot be.

A distribution adds a scheme with an entry point of the group `delayline.backends`: its name is the scheme, its value a
subclass of `Backend`. delayline's own are found by name too, because they are built on this module.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, runtime_checkable

from delayline.checks import full_scheme
from delayline.clock import ONE_SECOND
from delayline.delayed.delivery import StoredDelivery
from delayline.errors import ConfigurationError, DelaylineError
from delayline.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    import pyarrow as pa

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.store import DelayedMessageStore, SupportsManagement
    from delayline.transport import Transport

    #: Subject, whether it is right (None: unknown), and value or remedy.
    Findings = Sequence[tuple[str, bool | None, str]]

#: Why a job's message is refused: a queue that does not exist, an id that waits already.
UNKNOWN_QUEUE: Final = (
    "queue {!r} does not exist at the target: start its endpoint once, or run delayline setup --queue NAME"
)
DUPLICATE_ID: Final = "a message with this id is pending in the target's store already: cancel one of the two"
GROUP: Final = "delayline.backends"
#: delayline's own back ends by scheme. An entry point cannot replace them.
OWN_BACKENDS: Final = {
    "memory": "delayline.memory.backend:MemoryBackend",
    "shards": "delayline.sql.shards.backend:ShardsBackend",
    "azure": "delayline.azure.backend:AzureBackend",
    **dict.fromkeys(("amqp", "amqps"), "delayline.rabbitmq.backend:RabbitMQBackend"),
    **dict.fromkeys(("sqlite", "postgresql", "mariadb", "mysql", "mssql"), "delayline.sql.backend:SqlBackend"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Settings for what is made at a URL; a back end ignores settings that do not apply to it.

    Attributes:
        name: Name of the endpoint, and of the client's connections.
        error_queue: Queue for messages that the transport cannot read.
        schema: Schema of SQL tables; None for the connection's own.
        table_name: Table of delayed messages; None for the endpoint's.
        journal: Whether a SQL store keeps a journal; None leaves it as it was set up.
        two_phase: The two-phase commit that transport and store share, see `Backend.two_phase_commit`.
    """

    name: str = "delayline"
    error_queue: str = "error"
    schema: str | None = None
    table_name: str | None = None
    journal: bool | None = None
    fair_by: str | None = None
    queues_fair_by: str | None = None
    two_phase: object | None = None


@dataclass(frozen=True, slots=True)
class BackendUse:
    """What an endpoint has at a URL.

    Attributes:
        queues: Names of the queues that are there; None if its queues are elsewhere.
        delays: Whether its delayed messages wait there.
    """

    queues: Sequence[str] | None
    delays: bool


@dataclass(frozen=True, slots=True)
class DueWithin:
    """Messages that wait in a back end itself and are due within a span of time.

    Attributes:
        span: The longest time until they are due.
        count: How many they are.
    """

    span: timedelta
    count: int


@runtime_checkable
class SupportsNativeCount(Protocol):
    """Capability of a delayed delivery: count the messages that wait in the back end itself."""

    async def count_pending(self) -> Sequence[DueWithin]:
        """Return how many messages wait there, of all endpoints."""
        ...


@dataclass(frozen=True, slots=True)
class DueBy:
    """How many of the messages that wait in a back end itself are due within a span of time.

    Attributes:
        span: The time from now.
        at_least: How many are due by then for certain.
        estimate: How many probably are.
        at_most: How many may be.
    """

    span: timedelta
    at_least: int
    estimate: int
    at_most: int


def due_by(counts: Sequence[DueWithin], spans: Sequence[timedelta]) -> list[DueBy]:
    """Return the bounds of how many messages are due within each span, from the counts of a back end.

    A message of a delay level has up to half of the level's span left in it, and then any part of the rest below: a
    triangular distribution. The bounds are certain, its shape is an estimate.
    """
    return [
        DueBy(
            span,
            at_least=sum(within.count for within in counts if within.span <= span),
            estimate=round(sum(within.count * _share(span, within.span) for within in counts)),
            at_most=sum(within.count for within in counts),
        )
        for span in spans
    ]


def _share(span: timedelta, longest: timedelta) -> float:
    """Return how much of a triangle from now to a second after the longest time lies before the span's end."""
    part = 2 * (span / (longest + ONE_SECOND))
    if span >= longest:
        return 1.0
    return part * part / 2 if part <= 1 else 1 - (2 - part) ** 2 / 2


class MessageWriter(Protocol):
    """The connection of a job's task to a back end that holds delayed messages itself."""

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        """Send messages, and return once the back end has them durably.

        Args:
            messages: The columns id, destination, due, headers (JSON) and body.

        Returns:
            The reasons of messages that it can never take, by position. Any other failure is raised.
        """
        ...


class MessageSink(Protocol):
    """Where jobs send messages that wait in the back end itself; pickled to tasks."""

    async def must_exist(self) -> None:
        """Raise BackendUnusable if it is not set up."""
        ...

    async def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        """Return the destinations that cannot be reached, with the reason; changes nothing.

        Args:
            destinations: Names of queues.
        """
        ...

    async def writer(self, stack: AsyncExitStack) -> MessageWriter:
        """Return a connected writer.

        Args:
            stack: Closes it.
        """
        ...


class BulkRoute(StrEnum):
    """How jobs and migrations write many messages to a back end; the values are the kinds of a migration's targets."""

    MESSAGES = "messages"
    """Message by message, as an endpoint does."""
    STAGED_ROWS = "sql-store"
    """Rows of a SQL store that tasks stage and the driver commits."""
    STORED_ROWS = "plain-store"
    """Rows of a SQL store on a product without staging tables."""
    TABLE_ROWS = "azure-table"
    """Rows of a delayed messages table of Azure."""
    DELAY_LEVELS = "rabbitmq-levels"
    """Messages published to the delay levels of a broker."""


class Backend:
    """What there is behind the URLs of a scheme: an object for each scheme, which keeps no connection.

    Subclass it. A back end has `transport`, `store` or both; one whose queues hold messages until they are due has
    `delivery` and `pending` in place of a store, and says so in `native_delays`. All other members have defaults.

    Args:
        scheme: The URLs' scheme.
    """

    in_process: ClassVar[bool] = False
    """Whether the messages are in this process's memory and end with it."""
    native_delays: ClassVar[str | None] = None
    """What delayed messages wait in where the back end itself holds them, such as `delay levels`; None: in a store."""
    unlisted: ClassVar[str | None] = None
    """Why pending messages that the back end itself holds cannot be listed, and what to do; None if they can."""
    bulk_route: BulkRoute = BulkRoute.MESSAGES
    """How jobs and migrations write many messages there."""
    has_tables: ClassVar[bool] = False
    """Whether it is a SQL database, where delayline has tables for jobs, timeouts, minutes and the cold tier."""
    longest_delay: ClassVar[timedelta | None] = None
    """The longest time that a message can wait; None for no limit."""
    grain: ClassVar[timedelta] = timedelta(microseconds=1)
    """The resolution to which due times are rounded up."""
    largest_message: ClassVar[int] = 1 << 40
    """How many bytes headers and body of a message may have together."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    def transport(self, url: str, options: BackendOptions) -> Transport:
        """Return a new transport on the queues at `url`, without connecting.

        Args:
            url: The URL from the settings.
            options: The settings that apply to transports.

        Raises:
            ConfigurationError: The URL is wrong, or the back end has no queues.
        """
        raise ConfigurationError(f"{self.scheme}: has no queues, as {masked(url)!r} needs: give another transport_url")

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        """Return a new delayed message store at `url`, without connecting.

        Args:
            url: The URL from the settings.
            options: The settings that apply to stores.

        Raises:
            ConfigurationError: The URL is wrong, or the back end has no store.
        """
        raise ConfigurationError(
            f"{self.scheme}: has no delayed message store at {masked(url)!r}: give another store_url"
        )

    def delivery(
        self,
        url: str,
        options: BackendOptions,
        *,
        stored: StoredDelivery | None = None,
        stored_below: timedelta | None = None,
    ) -> DelayedDelivery:
        """Return a new delayed delivery by the back end itself, without connecting.

        Args:
            url: The URL from the settings.
            options: The settings that apply to it.
            stored: A store in front, which holds messages that the back end cannot.
            stored_below: Delays shorter than this wait in the store as well.

        Raises:
            ConfigurationError: The back end holds no messages until they are due, or takes no store in front.
        """
        raise ConfigurationError(f"{self.scheme}: holds no messages until they are due: give a store_url")

    def sink(self, url: str, name: str, *, endpoint: str = "") -> MessageSink:
        """Return what jobs send messages through that wait in the back end itself, without connecting.

        Args:
            url: The URL of the job's target.
            name: Name of the client's connections.
            endpoint: The endpoint that owns the messages.

        Raises:
            ConfigurationError: Jobs cannot write there.
        """
        raise ConfigurationError(f"jobs cannot write to {self.scheme}: URLs: give a database as store_url")

    def two_phase_commit(self) -> object | None:
        """Return a new two-phase commit for a transport and a store in two such back ends; None where there is none."""
        return None

    def must_exist(self, url: str) -> None:
        """Raise BackendUnusable if there is nothing at `url` and opening it would create an empty back end."""

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return what `delayline doctor` says about the back end.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.
            use: What the endpoint has there.

        Raises:
            BackendUnavailable, BackendUnusable: It cannot be reached, or refuses.
        """
        return [("back end", True, f"{self.scheme}: is installed; it has no own checks")]

    async def endpoints(self, url: str, options: BackendOptions) -> Sequence[str]:
        """Return the names of the endpoints that are set up there, as far as that can be told.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.
        """
        return ()

    async def set_up_queues(self, url: str, options: BackendOptions, queues: Sequence[str]) -> None:
        """Create further queues, with what they need for delayed messages. Idempotent.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.
            queues: Their names.
        """
        await self.transport(url, options).setup_infrastructure(queues)

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Sequence[str]:
        """Return the statements that a set-up would run, without running them.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.
            use: What is to be set up there.

        Raises:
            ConfigurationError: The back end cannot say it.
        """
        raise ConfigurationError(
            f"--dry-run prints SQL, which {self.scheme}: URLs do not use: run delayline setup without it"
        )

    async def after_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return steps after a set-up that may be refused without its failing: name, whether done, and the remedy.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.
            use: What was set up there.
        """
        return ()

    async def set_up_warnings(self, url: str, queues: Sequence[str]) -> Sequence[str]:
        """Return warnings about queues that were set up.

        Args:
            url: The URL from the settings.
            queues: Their names.
        """
        return ()

    def pending(self, url: str, options: BackendOptions) -> AbstractAsyncContextManager[SupportsManagement]:
        """Open the endpoint's pending messages that the back end itself holds, to be listed and changed.

        Args:
            url: The URL from the settings.
            options: The settings of the endpoint.

        Raises:
            ConfigurationError: They cannot be listed.
            BackendUnusable: The endpoint was not set up.
        """
        raise ConfigurationError(
            self.unlisted or f"{self.scheme}: cannot list, cancel or reschedule the messages that wait there"
        )

    async def count_pending(self, url: str) -> Sequence[DueWithin]:
        """Return how many messages wait in the back end itself, of all endpoints; none where they can be listed.

        Args:
            url: The URL from the settings.
        """
        return ()

    def as_sent(self, store: object) -> object:
        """Return the management of a store beside queues of this back end: with messages as they were sent.

        Args:
            store: The store; it may keep messages in another form until the back end takes them over.
        """
        return store


_loaded: Final[dict[str, Backend]] = {}


def find_backend(url: str) -> Backend | None:
    """Return the back end of the URL's scheme, None for an unknown scheme. Raises the other errors of `backend_of`."""
    scheme = full_scheme(url).partition(":")[0].partition("+")[0].lower()
    if scheme not in _loaded:
        made = _own(scheme) if scheme in OWN_BACKENDS else _installed(scheme)
        if made is None:
            return None
        _loaded[scheme] = made
    return _loaded[scheme]


def backend_of(url: str, *, kind: str = "back end") -> Backend:
    """Return the back end of the URL's scheme.

    Args:
        url: The URL to look up.
        kind: What is wanted there, such as `transport`, for the error.

    Raises:
        ConfigurationError: The scheme is unknown, or its distribution cannot be used.
        MissingExtra: The back end is delayline's own, and an extra is not installed.
    """
    backend = find_backend(url)
    if backend is None:
        known = ", ".join(f"{name}:" for name in known_schemes())
        raise ConfigurationError(f"no {kind} for the URL {masked(url)!r}. The supported schemes are {known}")
    return backend


def backend_with_tables(url: str, kind: str) -> Backend:
    """Return the back end of the URL's scheme, which is a SQL database.

    Args:
        url: The URL to look up.
        kind: What needs tables there, for the error.

    Raises:
        ConfigurationError: It is no SQL database. The error lists the schemes that are.
    """
    backend = backend_of(url, kind=kind)
    if not backend.has_tables:
        known = ", ".join(f"{name}:" for name in schemes_with(lambda other: other.has_tables))
        raise ConfigurationError(f"no {kind} for the URL {masked(url)!r}. The supported schemes are {known}")
    return backend


def delivery_at(url: str, options: BackendOptions) -> DelayedDelivery:
    """Return a new delayed delivery with its messages at the URL: in a store, or in the back end itself.

    Args:
        url: The URL to look up.
        options: The settings that apply to it.

    Raises:
        ConfigurationError: The back end keeps no delayed messages.
    """
    backend = backend_of(url, kind="delayed message store")
    if backend.native_delays is not None:
        return backend.delivery(url, options)
    return StoredDelivery(backend.store(url, options))


def known_schemes() -> list[str]:
    """Return delayline's own schemes and those of installed distributions, sorted."""
    return sorted({*OWN_BACKENDS, *(entry.name.lower() for entry in entry_points(group=GROUP))})


def schemes_with(ability: Callable[[Backend], bool]) -> list[str]:
    """Return the schemes whose back ends have an ability, sorted; without back ends that cannot be loaded.

    Args:
        ability: Returns whether a back end has it.
    """
    able = []
    for scheme in known_schemes():
        with contextlib.suppress(DelaylineError):
            if ability(backend_of(f"{scheme}:")):
                able.append(scheme)
    return able


def _own(scheme: str) -> Backend:
    module, _, name = OWN_BACKENDS[scheme].partition(":")
    made: Backend = getattr(import_module(module), name)(scheme)
    return made


def _installed(scheme: str) -> Backend | None:
    """Return the back end of an installed distribution; None if none has the scheme."""
    for entry in entry_points(group=GROUP):
        if entry.name.lower() == scheme:
            try:
                made = entry.load()
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(
                    f"the back end {entry.value!r} for {scheme}: URLs cannot be imported: {error}. "
                    "Reinstall its distribution"
                ) from error
            if not (isinstance(made, type) and issubclass(made, Backend)):
                raise ConfigurationError(
                    f"the back end {entry.value!r} for {scheme}: URLs is no subclass of delayline.spi.Backend. "
                    "Install another version of its distribution"
                )
            return made(scheme)
    return None
