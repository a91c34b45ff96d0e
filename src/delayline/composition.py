"""The one place that composes: settings and URLs become transports, stores, delayed deliveries and endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict, Unpack

from delayline.backends import AZURE, BROKERS, MEMORY, SQL, BackendOptions, backend_of, is_third_party, scheme_of
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.host import satellite_queues
from delayline.endpoint import CriticalErrorAction, Endpoint
from delayline.errors import ConfigurationError
from delayline.setting_values import masked
from delayline.timeouts.draining import draining_delivery, persister_at
from delayline.timeouts.manager import TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.store import DelayedMessageStore
    from delayline.receiving.recoverability import Recoverability
    from delayline.settings import Settings
    from delayline.sql import TwoPhaseCommit
    from delayline.sql.schema import TableGroup
    from delayline.timeouts import SqlTimeoutPersister
    from delayline.transport import Transport


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
