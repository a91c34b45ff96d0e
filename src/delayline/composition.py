"""Composition: settings and URLs become transports, stores, delayed deliveries and endpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Unpack, cast

from delayline.backends import BackendOptions, BackendUse, backend_of, backend_with_tables
from delayline.delayed.delivery import StoredDelivery
from delayline.delayed.host import satellite_queues
from delayline.endpoint import Endpoint
from delayline.errors import ConfigurationError
from delayline.masking import masked
from delayline.settings import settings_of_process
from delayline.timeouts.draining import draining_delivery, persister_at
from delayline.timeouts.manager import TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from delayline.delayed.delivery import DelayedDelivery
    from delayline.delayed.store import DelayedMessageStore
    from delayline.endpoint import CodeArguments
    from delayline.settings import Settings
    from delayline.sql import SqlInbox, SqlOutbox, TwoPhaseCommit
    from delayline.sql.schema import TableGroup
    from delayline.timeouts import SqlTimeoutPersister
    from delayline.transport import Transport


def options_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> BackendOptions:
    """Return what a back end takes of the settings."""
    return BackendOptions(
        name=settings.endpoint or "delayline",
        error_queue=settings.error_queue,
        schema=settings.schema,
        table_name=settings.table_name,
        journal=settings.journal,
        fair_by=settings.fair_by,
        queues_fair_by=settings.queues_fair_by,
        two_phase=two_phase,
    )


def transport_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> Transport:
    """Return a new transport on the queues of the settings. Raises ConfigurationError."""
    url = settings.resolved_transport_url
    backend = backend_of(url, kind="transport")
    if settings.queues_fair_by is not None and not backend.has_tables:
        raise ConfigurationError(
            f"queues_fair_by = {settings.queues_fair_by!r} needs queues in a SQL database, not at {masked(url)!r}, "
            "where messages are received as they came: leave it out, and give each tenant that may be busy a queue of "
            "its own"
        )
    return backend.transport(url, options_of(settings, two_phase=two_phase))


def store_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> DelayedMessageStore:
    """Return a new delayed message store of the settings. Raises ConfigurationError."""
    url = settings.resolved_store_url
    if settings.cold_tier is not None:
        from delayline.sql.shards.backend import map_named

        shards = map_named(url, schema=settings.schema)
        if shards is None:
            backend_with_tables(url, "store with a cold tier")
        from delayline.bulk.two_tier_store import ShardedTwoTierStore, TwoTierStore

        if two_phase is not None:
            raise ConfigurationError(
                "a store with a cold tier takes part in no two-phase commit: leave out one of them"
            )
        if shards is not None:
            return ShardedTwoTierStore(
                shards, cold_tier=settings.cold_tier, table_name=settings.table_name, journal=settings.journal
            )
        return TwoTierStore(
            url,
            table_name=settings.table_name,
            schema=settings.schema,
            journal=settings.journal,
            cold_tier=settings.cold_tier,
        )
    backend = backend_of(url, kind="delayed message store")
    if settings.journal and not backend.has_tables:
        raise ConfigurationError(
            f"journal = true needs a store in a SQL database, not at {masked(url)!r}: leave it out"
        )
    return backend.store(url, options_of(settings, two_phase=two_phase))


def persister_of(settings: Settings, *, two_phase: TwoPhaseCommit | None = None) -> SqlTimeoutPersister:
    """Return where the timeout manager of the settings keeps its timeouts. Raises ConfigurationError."""
    for name in ("table_name", "journal", "fair_by", "cold_tier", "delay_levels_from_seconds", "timeouts_url"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"timeout_manager = true and {name} exclude each other: leave out one of them")
    backend_with_tables(settings.resolved_store_url, "timeout manager's storage")
    return persister_at(settings.resolved_store_url, schema=settings.schema, two_phase=two_phase)


def satellites_of(settings: Settings) -> list[str]:
    """Return the timeout manager's queues, where the settings ask for it."""
    drained = settings.timeouts_url is not None and not settings.disable_timeout_manager
    if settings.endpoint is None or not (settings.timeout_manager or drained):
        return []
    return list(satellite_queues(transport_of(settings), settings.endpoint))


def two_phase_of(settings: Settings) -> TwoPhaseCommit | None:
    """Return the two-phase commit of queues and store; None if it is not set."""
    if not settings.two_phase:
        return None
    urls = {settings.resolved_transport_url: None, settings.resolved_store_url: None}
    commits = [backend_of(url).two_phase_commit() for url in urls]
    if len(commits) < 2 or None in commits:
        raise ConfigurationError(
            "two_phase = true needs queues and delayed messages in two SQL databases: give transport_url and "
            f"store_url, which are {masked(settings.resolved_transport_url)!r} and "
            f"{masked(settings.resolved_store_url)!r}, or leave it out"
        )
    return cast("TwoPhaseCommit", commits[0])


def inbox_of(settings: Settings) -> SqlInbox | None:
    """Return the inbox of the settings; None for none."""
    window = settings.inbox_window
    if settings.inbox_url is None or window is None:
        return None
    backend_with_tables(settings.inbox_url, "inbox")
    from delayline.sql import SqlInbox

    return SqlInbox(settings.inbox_url, window=window, schema=settings.schema)


def outbox_of(settings: Settings) -> SqlOutbox | None:
    """Return the outbox of the settings; None for none."""
    if (url := settings.resolved_outbox_url) is None:
        return None
    backend_with_tables(url, "outbox")
    from delayline.sql import SqlOutbox

    return SqlOutbox(url, schema=settings.schema)


def delays_url(settings: Settings) -> str | None:
    """Return the URL of the back end that itself holds delayed messages until they are due; None if none does."""
    if settings.timeout_manager:
        return None
    if settings.delay_levels_from_seconds is not None:
        return settings.resolved_transport_url
    url = settings.resolved_store_url
    return None if backend_of(url).native_delays is None else url


def uses_of(settings: Settings, queues: Sequence[str], delays_at: Collection[str | None]) -> Mapping[str, BackendUse]:
    """Return what the endpoint has at each URL of its settings: its queues, and delayed messages at some URLs."""
    queues_url = settings.resolved_transport_url
    urls = dict.fromkeys([settings.resolved_store_url, queues_url])
    return {url: BackendUse(queues if url == queues_url else None, url in delays_at) for url in urls}


async def set_up_features(settings: Settings, groups: Sequence[TableGroup]) -> None:
    """Create the tables of the groups in the store's database, or upgrade them."""
    backend_with_tables(settings.resolved_store_url, "database")
    from delayline.sql import databases

    await databases.set_up(settings.resolved_store_url, groups, schema=settings.schema)


async def planned_features(settings: Settings, groups: Sequence[TableGroup]) -> Sequence[str]:
    """Return the SQL that `set_up_features` would run, without running it."""
    backend_with_tables(settings.resolved_store_url, "database")
    from delayline.sql import databases

    return await databases.planned(settings.resolved_store_url, groups, schema=settings.schema)


async def set_up_queues(settings: Settings, queues: Sequence[str]) -> None:
    """Create further queues, with what the back end needs to deliver delayed messages to them."""
    url = settings.resolved_transport_url
    await backend_of(url, kind="transport").set_up_queues(url, options_of(settings), queues)


async def after_setup(settings: Settings, queues: Sequence[str] = ()) -> Sequence[tuple[str, bool | None, str]]:
    """Return set-up steps that may be refused without failing: name, whether done (None: unknown), and the remedy.

    Args:
        settings: The settings of the set-up.
        queues: All queues that were set up.
    """
    delays_at = [] if settings.endpoint is None else [settings.resolved_store_url]
    steps: list[tuple[str, bool | None, str]] = []
    for url, use in uses_of(settings, queues, delays_at).items():
        steps += await backend_of(url).after_setup(url, options_of(settings), use)
    return steps


async def set_up_warnings(settings: Settings, queues: Sequence[str]) -> Sequence[str]:
    """Return warnings after a set-up of the queues: about queues that will refuse due messages."""
    url = settings.resolved_transport_url
    return await backend_of(url).set_up_warnings(url, queues)


async def planned_setup(settings: Settings, queues: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the SQL that setting the endpoint up, with further queues, would run, by the URL of where it would.

    Nothing is made or changed.
    """
    options, names, store_url = options_of(settings), list(queues), settings.resolved_store_url
    if settings.endpoint is not None:
        names = [settings.endpoint, settings.error_queue, *names, *satellites_of(settings)]
    stored = settings.endpoint is not None and not settings.timeout_manager
    uses = uses_of(settings, names, [store_url] if stored else [])
    urls = [settings.resolved_transport_url] if settings.endpoint is None else list(uses)
    plans = {url: await backend_of(url).planned_setup(url, options, uses[url]) for url in reversed(urls)}
    planned = {url: list(plans[url]) for url in urls}
    if settings.endpoint is not None:
        timeouts = {store_url: persister_of(settings)} if settings.timeout_manager else {}
        if settings.timeouts_url is not None and not settings.disable_timeout_manager:
            timeouts[settings.timeouts_url] = persister_at(settings.timeouts_url, schema=settings.schema)
        parts: list[tuple[str | None, SqlTimeoutPersister | SqlInbox | SqlOutbox | None]] = [
            *timeouts.items(),
            (settings.inbox_url, inbox_of(settings)),
            (settings.resolved_outbox_url, outbox_of(settings)),
        ]
        for place, part in parts:
            if place is not None and part is not None:
                statements = await part.planned_infrastructure(settings.endpoint)
                planned[place] = list(dict.fromkeys([*planned.get(place, ()), *statements]))
    return planned


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
    url, levels_from = settings.resolved_transport_url, settings.delay_levels_from_seconds
    if levels_from is not None and backend_of(url).native_delays is None:
        raise ConfigurationError(
            f"delay_levels_from_seconds = {levels_from:g} needs queues on RabbitMQ, not at {masked(url)!r}: leave it "
            "out, or give a transport_url that begins with amqp:"
        )
    waiting = backend_of(settings.resolved_store_url, kind="delayed message store")
    options = options_of(settings, two_phase=two_phase)
    if waiting.native_delays is not None and settings.fair_by is not None:
        raise ConfigurationError(
            f"fair_by = {settings.fair_by!r} needs delayed messages in a store, not in {waiting.native_delays}: "
            "leave it out, or give a store_url of a SQL database"
        )
    if waiting.native_delays is not None:
        return waiting.delivery(settings.resolved_store_url, options)
    stored = _stored_delivery(settings, polling=polling, two_phase=two_phase)
    if levels_from is None:
        return stored
    below = timedelta(seconds=levels_from) if levels_from else None
    return backend_of(url).delivery(url, options, stored=stored, stored_below=below)


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
        fair_by=settings.fair_by,
        polling=polling,
    )


def endpoint_of_process(name: str | None, config: Path | str | None, **code: Unpack[CodeArguments]) -> Endpoint:
    """Return the endpoint that the settings of this process describe: see `Endpoint.from_settings`."""
    return endpoint_from(settings_of_process(name, config), **code)


def endpoint_from(settings: Settings, *, polling: bool = True, **overrides: Unpack[CodeArguments]) -> Endpoint:
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
        inbox=inbox_of(settings) if polling else None,
        outbox=outbox_of(settings) if polling else None,
        **overrides,
    )
    endpoint.made_from = settings
    if settings.history and polling:
        backend_with_tables(settings.resolved_store_url, "store of minute rows (history = true)")
        from delayline.telemetry.history import MinuteHistory

        endpoint.observe(MinuteHistory(settings.resolved_store_url, schema=settings.schema))
    return endpoint
