"""URL schemes: the back end that each one names, delayline's own and those of installed distributions.

A distribution adds a scheme with an entry point of the group `delayline.backends`: its name is the scheme, its value a
module or object that fulfils `Backend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

from delayline.checks import full_scheme
from delayline.errors import ConfigurationError
from delayline.setting_values import masked

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.delayed.store import DelayedMessageStore
    from delayline.sql import TwoPhaseCommit
    from delayline.transport import Transport

GROUP: Final = "delayline.backends"
MEMORY: Final = "memory"
AZURE: Final = "azure"
BROKERS: Final = ("amqp", "amqps")
SQL: Final = ("sqlite", "postgresql", "mariadb", "mysql", "mssql")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Settings for a transport or store at a URL; a back end ignores those that do not apply to it.

    Attributes:
        name: Name of the client's connections, usually the endpoint's.
        error_queue: Queue for messages that the transport cannot read.
        schema: Schema of SQL tables; None for the connection's own.
        table_name: Table of delayed messages; None for the endpoint's.
        journal: Whether a SQL store keeps a journal; None leaves it as it was set up.
        two_phase: The two-phase commit that a SQL transport and store share.
    """

    name: str = "delayline"
    error_queue: str = "error"
    schema: str | None = None
    table_name: str | None = None
    journal: bool | None = None
    two_phase: TwoPhaseCommit | None = None


class Backend(Protocol):
    """The transport and the store behind one URL scheme; a module with these two functions is one.

    A back end without one of them raises ConfigurationError there.
    """

    def transport(self, url: str, options: BackendOptions) -> Transport:
        """Return a new transport on the queues at `url`, without connecting.

        Args:
            url: The URL from the settings; its scheme is the entry point's name.
            options: The settings that apply to transports and stores.
        """
        ...

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        """Return a new delayed message store at `url`, without connecting. The arguments are those of `transport`."""
        ...


class _Memory:
    def transport(self, url: str, options: BackendOptions) -> Transport:
        del url, options
        from delayline.memory import MemoryTransport

        return MemoryTransport()

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        _refuse_journal(url, options)
        from delayline.memory import MemoryDelayedMessageStore

        return MemoryDelayedMessageStore()


class _RabbitMQ:
    def transport(self, url: str, options: BackendOptions) -> Transport:
        from delayline.rabbitmq import RabbitMQTransport

        return RabbitMQTransport(url, error_queue=options.error_queue, name=options.name)

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        del url, options
        raise ConfigurationError(
            "messages in RabbitMQ's delay levels can be counted, not listed, cancelled or rescheduled. Count them "
            "with: delayline rabbitmq pending. For the rest keep delayed messages in a database: store_url"
        )


class _Azure:
    def transport(self, url: str, options: BackendOptions) -> Transport:
        del options
        from delayline.azure import AzureStorageQueueTransport

        return AzureStorageQueueTransport(url)

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        _refuse_journal(url, options)
        from delayline.azure import AzureDelayedTable

        return AzureDelayedTable(url, table_name=options.table_name)


class _Sql:
    def transport(self, url: str, options: BackendOptions) -> Transport:
        from delayline.sql import SqlTransport

        return SqlTransport(url, schema=options.schema, two_phase=options.two_phase)

    def store(self, url: str, options: BackendOptions) -> DelayedMessageStore:
        from delayline.sql import SqlDelayedMessageStore

        return SqlDelayedMessageStore(
            url,
            table_name=options.table_name,
            schema=options.schema,
            journal=options.journal,
            two_phase=options.two_phase,
        )


#: delayline's own schemes. An entry point cannot replace one of them.
_OWN: Final[dict[str, Callable[[], Backend]]] = {
    MEMORY: _Memory,
    AZURE: _Azure,
    **dict.fromkeys(BROKERS, _RabbitMQ),
    **dict.fromkeys(SQL, _Sql),
}


def backend_of(url: str, *, kind: str) -> Backend:
    """Return the back end of the URL's scheme.

    Args:
        url: The URL to look up.
        kind: `transport` or `delayed message store`, for the error.

    Raises:
        ConfigurationError: The scheme is unknown, or its distribution cannot be imported.
    """
    scheme = scheme_of(url)
    if scheme in _OWN:
        return _OWN[scheme]()
    for entry in entry_points(group=GROUP):
        if entry.name.lower() == scheme:
            try:
                return cast("Backend", entry.load())
            except (ImportError, AttributeError) as error:
                raise ConfigurationError(
                    f"the back end {entry.value!r} for {scheme}: URLs cannot be imported: {error}. "
                    "Reinstall its distribution"
                ) from error
    known = ", ".join(f"{name}:" for name in known_schemes())
    raise ConfigurationError(f"no {kind} for the URL {masked(url)!r}. The supported schemes are {known}")


def is_third_party(url: str) -> bool:
    """Return whether an installed distribution, not delayline itself, provides the URL's scheme."""
    scheme = scheme_of(url)
    return scheme not in _OWN and any(entry.name.lower() == scheme for entry in entry_points(group=GROUP))


def known_schemes() -> list[str]:
    """Return delayline's own schemes and those of installed distributions, sorted."""
    return sorted({*_OWN, *(entry.name.lower() for entry in entry_points(group=GROUP))})


def scheme_of(url: str) -> str:
    """Return the URL's scheme without a driver's name: `postgresql` of `postgresql+psycopg://...`."""
    return full_scheme(url).partition(":")[0].partition("+")[0].lower()


def _refuse_journal(url: str, options: BackendOptions) -> None:
    if options.journal:
        raise ConfigurationError(
            f"journal = true needs a store in a SQL database, not at {masked(url)!r}: leave it out"
        )
