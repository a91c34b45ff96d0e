"""The one place that composes: delayline.toml, DELAYLINE_* variables and flags become settings, URLs become objects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from delayline import setting_values
from delayline.backends import AZURE, BROKERS, MEMORY, SQL, BackendOptions, backend_of, is_third_party, scheme_of
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.host import satellite_queues
from delayline.endpoint import DEFAULT_CONCURRENCY, CriticalErrorAction, Endpoint
from delayline.errors import ConfigurationError
from delayline.setting_values import FILE_NAME, PREFIX, Source, from_environment, from_file, from_flags, masked
from delayline.timeouts.draining import draining_delivery, persister_at
from delayline.timeouts.manager import TimeoutManagerDelivery
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.store import DelayedMessageStore
    from delayline.receiving.recoverability import Recoverability
    from delayline.sql import TwoPhaseCommit
    from delayline.sql.schema import TableGroup
    from delayline.timeouts import SqlTimeoutPersister
    from delayline.transport import Transport


def _setting(default: Any, read: setting_values.Read, text: str, example: str) -> Any:  # noqa: ANN401 - typed where it is assigned
    return field(default=default, metadata={"read": read, "text": text, "example": example})


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """Everything that can be set from outside, checked. Passwords in its URLs never show in its repr."""

    endpoint: str | None = _setting(None, setting_values.name, "Name of the endpoint; its queue carries it.", "sales")
    url: str = _setting(
        "sqlite:///delayline.db", setting_values.url, "Where queues and delayed messages are.", "sqlite:///my.db"
    )
    store_url: str | None = _setting(
        None, setting_values.url, "Where delayed messages are, if not at url.", "sqlite:///my.db"
    )
    transport_url: str | None = _setting(
        None, setting_values.url, "Where queues are, if not at url.", "sqlite:///my.db"
    )
    delay_levels_from_seconds: float | None = _setting(
        None,
        setting_values.seconds_or_none,
        "With queues on RabbitMQ and a store: delays of so many seconds or more wait in the broker.",
        "60",
    )
    schema: str | None = _setting(
        None,
        setting_values.text,
        "Schema of the tables in SQL databases; the connection's own, on SQL Server dbo, if left out.",
        "messaging",
    )
    two_phase: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Make transactions of queues and store in two SQL databases one, by a two-phase commit.",
        "true",
    )
    table_name: str | None = _setting(
        None, setting_values.text, "Table of the delayed messages; {endpoint}.timeouts if left out.", "sales.timeouts"
    )
    journal: bool | None = _setting(
        None,
        setting_values.yes_or_no,
        "Record the events of each message in the SQL journal; once set up, it stays on.",
        "true",
    )
    history: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Write a row a minute of what each process has done, to the SQL store's database, for the dashboard.",
        "true",
    )
    cold_tier: str | None = _setting(
        None,
        setting_values.text,
        "Folder or URI of the Parquet files in which far messages wait; needs the extra spark.",
        "s3://bucket/sales",
    )
    timeout_manager: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Keep delayed messages in a timeout manager, whose storage is at store_url or url, not in a store.",
        "true",
    )
    timeout_manager_outage_seconds: float = _setting(
        120.0,
        setting_values.seconds_or_none,
        "How long a timeout manager's storage may be out of reach before a critical error.",
        "120",
    )
    timeouts_url: str | None = _setting(
        None, setting_values.url, "Where an old timeout manager's timeouts are, to be drained.", "sqlite:///my.db"
    )
    disable_timeout_manager: bool = _setting(False, setting_values.yes_or_no, "Drain it no more.", "true")
    error_queue: str = _setting("error", setting_values.name, "Queue of messages that failed for good.", "error")
    number_of_retries: int = _setting(0, setting_values.whole(0), "Further attempts to forward a due message.", "7")
    transaction_mode: TransactionMode | None = _setting(  # noqa: RUF009 - a field, made by dataclasses.field
        None,
        setting_values.mode,
        f"{', '.join(setting_values.MODES)}; the strongest possible if left out.",
        "TRANSACTION_SCOPE",
    )
    concurrency: int = _setting(DEFAULT_CONCURRENCY, setting_values.whole(1), "Messages handled at once.", "4")
    batch_size: int = _setting(500, setting_values.whole(1), "Due messages forwarded at once.", "500")
    batch_bytes: int = _setting(
        16 * 1024 * 1024, setting_values.whole(1, 2**63 - 1), "Bytes forwarded at once.", "16777216"
    )
    maximum_recovery_failures_per_second: int = _setting(
        1, setting_values.whole(1), "Failures to move failed messages before a critical error.", "1"
    )
    store_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long storing may fail before a critical error.", "30"
    )
    fetch_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long fetching may fail before a critical error.", "30"
    )
    dispatch_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long dispatching may fail before a critical error.", "30"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                object.__setattr__(self, one.name, _checked(one.name, value, Source("argument", "{name}={example!r}")))

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.name}={_shown(getattr(self, one.name))!r}" for one in fields(self))
        return f"Settings({shown})"

    @property
    def resolved_store_url(self) -> str:
        """The URL of the delayed message store."""
        return self.store_url or self.url

    @property
    def resolved_transport_url(self) -> str:
        """The URL of the transport."""
        return self.transport_url or self.url

    @property
    def named_endpoint(self) -> str:
        """The endpoint's name; raises ConfigurationError, saying how to give one, where there is none."""
        if self.endpoint is None:
            raise ConfigurationError(
                f"no endpoint is named: use --endpoint NAME, the variable {PREFIX}ENDPOINT, "
                f'or endpoint = "NAME" in {FILE_NAME}'
            )
        return self.endpoint


_KNOWN: Final = {one.name: one.metadata for one in fields(Settings)}


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of Settings."""
    return tuple(_KNOWN)


def describe_setting(name: str) -> str:
    """Return the one-line explanation of a setting: for help texts and the reference page."""
    return str(_KNOWN[name]["text"])


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Return the command line flag of a setting."""
    return "--" + name.replace("_", "-")


def load_settings(
    config: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Return the settings of `config` (else ./delayline.toml where there is one), the environment and `flags`.

    Later ones win; a flag that is None was not given. Raises ConfigurationError naming the value, its place and the
    remedy.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    variables = {variable_of(name): name for name in _KNOWN}
    given = from_file(config, _KNOWN) | from_environment(environ, variables) | from_flags(flags or {}, flag_of)
    for name, (value, source) in given.items():
        values[name] = _checked(name, value, source)
    return Settings(**values)


def _checked(name: str, value: object, source: Source) -> object:
    metadata = _KNOWN[name]
    try:
        return metadata["read"](value)
    except ValueError as error:
        example = source.form.format(name=name, example=metadata["example"])
        raise ConfigurationError(
            f"{name} = {_shown(value)!r} (from {source.place}) {error}. Write for example: {example}"
        ) from None


def _shown(value: object) -> object:
    if isinstance(value, TransactionMode):
        return value.name
    shown = masked(value) if isinstance(value, str) else value
    if isinstance(value, int) and abs(value) > 10**setting_values.SHOWN:
        return f"{value.bit_length()} bits"  # as text it has thousands of digits
    return (
        f"{shown[: setting_values.SHOWN]}..." if isinstance(shown, str) and len(shown) > setting_values.SHOWN else shown
    )


def transport_from(
    url: str,
    *,
    error_queue: str = "error",
    name: str = "delayline",
    schema: str | None = None,
    two_phase: TwoPhaseCommit | None = None,
) -> Transport:
    """Return a new transport on the queues at `url`; raises ConfigurationError naming the supported schemes.

    On RabbitMQ messages that cannot be read go to `error_queue`, and `name` begins the names of connections. schema
    and two_phase are of SQL databases, and of no concern to others.
    """
    options = BackendOptions(error_queue=error_queue, name=name, schema=schema, two_phase=two_phase)
    return backend_of(url, kind="transport").transport(url, options)


def transport_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> Transport:
    """Return a new transport on the queues of the settings. Raises ConfigurationError."""
    return transport_from(
        settings.resolved_transport_url,
        error_queue=settings.error_queue,
        name=settings.endpoint or "delayline",
        schema=settings.schema,
        two_phase=two_phase,
    )


def store_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> DelayedMessageStore:
    """Return a new delayed message store of the settings. Raises ConfigurationError."""
    return store_from(
        settings.resolved_store_url,
        table_name=settings.table_name,
        schema=settings.schema,
        journal=settings.journal,
        cold_tier=settings.cold_tier,
        two_phase=two_phase,
    )


def store_from(
    url: str,
    *,
    table_name: str | None = None,
    schema: str | None = None,
    journal: bool | None = None,
    cold_tier: str | None = None,
    two_phase: TwoPhaseCommit | None = None,
) -> DelayedMessageStore:
    """Return a new delayed message store at `url`; raises ConfigurationError naming the supported schemes."""
    if cold_tier is not None:
        _must_be_sql(url, "store with a cold tier")
        from delayline.bulk.two_tier_store import TwoTierStore

        if two_phase is not None:
            raise ConfigurationError(
                "a store with a cold tier takes part in no two-phase commit: leave out one of them"
            )
        return TwoTierStore(url, table_name=table_name, schema=schema, journal=journal, cold_tier=cold_tier)
    options = BackendOptions(table_name=table_name, schema=schema, journal=journal, two_phase=two_phase)
    return backend_of(url, kind="delayed message store").store(url, options)


def persister_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> SqlTimeoutPersister:
    """Return where the timeout manager of the settings keeps its timeouts. Raises ConfigurationError."""
    for name in ("table_name", "journal", "cold_tier", "delay_levels_from_seconds", "timeouts_url"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"timeout_manager = true and {name} exclude each other: leave out one of them")
    _must_be_sql(settings.resolved_store_url, "timeout manager's storage")
    return persister_at(settings.resolved_store_url, schema=settings.schema, two_phase=two_phase)


def satellites_of(settings: Settings) -> list[str]:
    """Return the timeout manager's queues, where the settings have one."""
    drained = settings.timeouts_url is not None and not settings.disable_timeout_manager
    if settings.endpoint is None or not (settings.timeout_manager or drained):
        return []
    return list(satellite_queues(transport_of(settings), settings.endpoint))


def two_phase_of(settings: Settings) -> TwoPhaseCommit | None:
    """Return the two-phase commit of queues and store; None if it is not set."""
    if not settings.two_phase:
        return None
    queues, waiting = settings.resolved_transport_url, settings.resolved_store_url
    if queues == waiting or not {scheme_of(queues), scheme_of(waiting)} <= set(SQL):
        raise ConfigurationError(
            "two_phase = true needs queues and delayed messages in two SQL databases: give transport_url and "
            f"store_url, which are {masked(queues)!r} and {masked(waiting)!r}, or leave it out"
        )
    from delayline.sql import TwoPhaseCommit

    return TwoPhaseCommit()


def must_exist(url: str) -> None:
    """Raise BackendUnusable if there is nothing at `url` and opening it would create an empty back end."""
    if on_rabbitmq(url) or scheme_of(url) == AZURE or is_third_party(url):
        return
    _must_be_sql(url, "database")

    from delayline.sql import databases

    databases.must_exist(url)


async def examine(
    url: str,
    *,
    delay_levels: bool = True,
    endpoint: str | None = None,
    schema: str | None = None,
    queues: Sequence[str] = (),
) -> Sequence[tuple[str, bool | None, str]]:
    """Return findings about the back end at `url`: subject, whether it is right (None: unknown), and value."""
    if on_rabbitmq(url):
        from delayline.rabbitmq.admin.doctor import examine as examine_broker

        return await examine_broker(url, delay_levels=delay_levels, endpoint=endpoint, queues=queues)
    if scheme_of(url) == AZURE:
        from delayline.azure.doctor import examine as examine_account

        return await examine_account(url, endpoint=endpoint)
    if is_third_party(url):
        return [("back end", True, f"{scheme_of(url)}: is installed; it has no own checks")]
    _must_be_sql(url, "database")

    from delayline.sql import databases

    return await databases.examine(url, schema=schema)


async def set_up_features(settings: Settings, groups: Sequence[TableGroup]) -> None:
    """Create the tables of the groups in the store's database, or upgrade them."""
    _must_be_sql(settings.resolved_store_url, "database")
    from delayline.sql import databases

    await databases.set_up(settings.resolved_store_url, groups, schema=settings.schema)


async def planned_features(settings: Settings, groups: Sequence[TableGroup]) -> Sequence[str]:
    """Return the SQL that `set_up_features` would run, without running it."""
    _must_be_sql(settings.resolved_store_url, "database")
    from delayline.sql import databases

    return await databases.planned(settings.resolved_store_url, groups, schema=settings.schema)


async def set_up_queues(settings: Settings, queues: Sequence[str]) -> None:
    """Create further queues; on RabbitMQ the delay levels, where there are any, deliver to them as well."""
    await transport_of(settings).setup_infrastructure(queues)
    place = settings.resolved_transport_url
    if on_rabbitmq(place):
        from delayline.rabbitmq.address import BrokerAddress
        from delayline.rabbitmq.admin.operations import bind
        from delayline.rabbitmq.infrastructure import DelayInfrastructure

        address = BrokerAddress.parse(place)
        await bind(address, DelayInfrastructure.named(address.delays), queues)


async def after_setup(settings: Settings, queues: Sequence[str] = ()) -> Sequence[tuple[str, bool | None, str]]:
    """Return set-up steps that may be refused without failing: name, whether done (None: unknown), and the remedy.

    Args:
        settings: The settings of the set-up.
        queues: All queues that were set up.
    """
    steps: list[tuple[str, bool | None, str]] = []
    if on_rabbitmq(settings.resolved_transport_url):
        from delayline.rabbitmq.admin.doctor import examine as examine_broker

        url = settings.resolved_transport_url
        steps += await examine_broker(url, delay_levels=False, queues=queues)
    place = settings.resolved_store_url
    if settings.endpoint is not None and on_rabbitmq(place):
        from delayline.rabbitmq.address import BrokerAddress
        from delayline.rabbitmq.admin.operations import catch_undeliverable, lift_limits
        from delayline.rabbitmq.infrastructure import DelayInfrastructure

        address = BrokerAddress.parse(place)
        levels = DelayInfrastructure.named(address.delays)
        steps += [await catch_undeliverable(address, levels), await lift_limits(address, levels)]
    return steps


async def set_up_warnings(settings: Settings, queues: Sequence[str]) -> Sequence[str]:
    """Return warnings after a set-up of these queues: about those that will refuse due messages."""
    place = settings.resolved_transport_url
    if not on_rabbitmq(place):
        return []
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.admin.operations import refusing_queues
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

    address = BrokerAddress.parse(place)
    return await refusing_queues(address, DelayInfrastructure.named(address.delays), queues)


async def planned_setup(settings: Settings, queues: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the SQL that setting the endpoint up, with further queues, would run, by the URL of where it would.

    Nothing is made or changed.
    """
    if on_rabbitmq(settings.resolved_transport_url):
        raise ConfigurationError("a dry run shows SQL, and RabbitMQ has none. See: delayline rabbitmq verify")
    if AZURE in {scheme_of(settings.resolved_transport_url), scheme_of(settings.resolved_store_url)}:
        raise ConfigurationError(
            "--dry-run prints SQL, which Azure Storage does not use: run delayline setup without it"
        )
    _must_be_sql(settings.resolved_transport_url, "transport")
    _must_be_sql(settings.resolved_store_url, "delayed message store")
    from delayline.sql import SqlDelayedMessageStore, SqlTransport

    names, schema = list(queues), settings.schema
    planned: dict[str, Sequence[str]] = {}
    if settings.endpoint is not None:
        names = [settings.endpoint, settings.error_queue, *names, *satellites_of(settings)]
        kept = (
            persister_of(settings)
            if settings.timeout_manager
            else SqlDelayedMessageStore(
                settings.resolved_store_url, table_name=settings.table_name, schema=schema, journal=settings.journal
            )
        )
        planned[settings.resolved_store_url] = await kept.planned_infrastructure(settings.endpoint)
        drained = None if settings.disable_timeout_manager else settings.timeouts_url
        if drained is not None:
            statements = await persister_at(drained, schema=schema).planned_infrastructure(settings.endpoint)
            planned[drained] = list(dict.fromkeys([*planned.get(drained, ()), *statements]))
    statements = await SqlTransport(settings.resolved_transport_url, schema=schema).planned_infrastructure(names)
    both = [*planned.get(settings.resolved_transport_url, ()), *statements]
    return planned | {settings.resolved_transport_url: list(dict.fromkeys(both))}


def in_memory(url: str) -> bool:
    """Return whether the messages at `url` are lost with the process."""
    return scheme_of(url) == MEMORY


def on_rabbitmq(url: str) -> bool:
    """Return whether `url` is a RabbitMQ URL."""
    return scheme_of(url) in BROKERS


def _must_be_sql(url: str, what: str) -> None:
    """Raise ConfigurationError unless the scheme is a SQL database's."""
    if scheme_of(url) not in SQL:
        known = ", ".join(f"{name}:" for name in sorted(SQL))
        raise ConfigurationError(f"no {what} for the URL {masked(url)!r}. The supported schemes are {known}")


def delivery_from(
    settings: Settings, *, polling: bool = True, two_phase: TwoPhaseCommit | None = None
) -> DelayedDelivery:
    """Return the delayed delivery that the settings describe; without polling its store, if any, is only stored in."""
    if settings.timeout_manager:
        return TimeoutManagerDelivery(
            persister_of(settings, two_phase=two_phase),
            time_to_wait_before_triggering_critical_error=timedelta(seconds=settings.timeout_manager_outage_seconds),
            batch_size=settings.batch_size,
            polling=polling,
        )
    levels_from = settings.delay_levels_from_seconds
    if levels_from is not None and not on_rabbitmq(settings.resolved_transport_url):
        raise ConfigurationError(
            f"delay_levels_from_seconds = {levels_from:g} needs queues on RabbitMQ, not at "
            f"{masked(settings.resolved_transport_url)!r}: leave it out, or give a transport_url that begins with amqp:"
        )
    if on_rabbitmq(settings.resolved_store_url):
        from delayline.rabbitmq import DelayLevelDelivery

        return DelayLevelDelivery()
    stored = _stored_delivery(settings, polling=polling, two_phase=two_phase)
    if levels_from is None:
        return stored
    from delayline.rabbitmq import DelayLevelDelivery

    return DelayLevelDelivery(stored=stored, stored_below=timedelta(seconds=levels_from) if levels_from else None)


def _stored_delivery(settings: Settings, *, polling: bool, two_phase: TwoPhaseCommit | None) -> StoredDelivery:
    return StoredDelivery(
        store_of(settings, two_phase=two_phase),
        number_of_retries=settings.number_of_retries,
        time_to_trigger_store_circuit_breaker=timedelta(seconds=settings.store_circuit_breaker_seconds),
        time_to_trigger_fetch_circuit_breaker=timedelta(seconds=settings.fetch_circuit_breaker_seconds),
        time_to_trigger_dispatch_circuit_breaker=timedelta(seconds=settings.dispatch_circuit_breaker_seconds),
        maximum_recovery_failures_per_second=settings.maximum_recovery_failures_per_second,
        batch_size=settings.batch_size,
        batch_bytes=settings.batch_bytes,
        polling=polling,
    )


class EndpointOverrides(TypedDict, total=False):
    """Settings that a program may decide itself: arguments of Endpoint."""

    recoverability: Recoverability | None
    send_only: bool
    on_critical_error: CriticalErrorAction
    setup_infrastructure: bool
    clock: Clock | None


def endpoint_from(settings: Settings, *, polling: bool = True, **overrides: Unpack[EndpointOverrides]) -> Endpoint:
    """Return the endpoint that the settings describe, not started yet. Raises ConfigurationError."""
    name, two_phase = settings.named_endpoint, two_phase_of(settings)
    endpoint = Endpoint(
        name,
        transport=transport_of(settings, two_phase=two_phase),
        delayed_delivery=delivery_from(settings, polling=polling, two_phase=two_phase),
        transaction_mode=settings.transaction_mode,
        error_queue=settings.error_queue,
        concurrency=settings.concurrency,
        draining=draining_delivery(
            settings.timeouts_url,
            polling=polling,
            schema=settings.schema,
            outage=timedelta(seconds=settings.timeout_manager_outage_seconds),
        ),
        disable_timeout_manager=settings.disable_timeout_manager,
        **overrides,
    )
    if settings.history and polling:
        _must_be_sql(settings.resolved_store_url, "store of minute rows (history = true)")
        from delayline.telemetry.history import MinuteHistory

        endpoint.observe(MinuteHistory(settings.resolved_store_url, schema=settings.schema))
    return endpoint
