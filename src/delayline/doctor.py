"""Checks an endpoint's connection, rights, tables, queues and pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.backends import backend_of
from delayline.clock import ONE_SECOND
from delayline.composition import (
    delays_url,
    delivery_from,
    endpoint_from,
    options_of,
    outbox_of,
    satellites_of,
    transport_of,
    two_phase_of,
    uses_of,
)
from delayline.delayed.store import DueBucket, SupportsDueForecast, SupportsRightsCheck
from delayline.error_queue import managed_queues
from delayline.errors import DelaylineError, QueueNotFound
from delayline.masking import masked
from delayline.opening import open_transport, open_waiting
from delayline.readable import duration, local, relative
from delayline.timeouts.draining import remaining_timeouts
from delayline.timeouts.persister import TO_GIVE_A_TIME
from delayline.transaction import TransactionMode
from delayline.transport import SupportsQueueComparison, SupportsReceiverLookup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from delayline.delayed.store import SupportsManagement
    from delayline.settings import Settings
    from delayline.timeouts.draining import RemainingTimeouts

#: A message overdue for longer means that no poller dispatches.
STALE_AFTER: Final = timedelta(seconds=10)
LONGEST_SPAN: Final = timedelta(days=365_000)


@dataclass(frozen=True, slots=True)
class Finding:
    """What an examination found about a subject."""

    what: str
    ok: bool | None
    """None if it is unknown, because it could not be looked at."""
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers in the text, by name: `messages`, `oldest_seconds`."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers above which an endpoint is not healthy."""

    overdue: timedelta = STALE_AFTER
    """How long the oldest pending message may be overdue."""
    errors: int | None = None
    """How many messages may be in the error queue; None for any number."""
    queue: int | None = None
    """How many messages may be in the endpoint's queue; None for any number."""


def check_urls(settings: Settings) -> None:
    """Raise ConfigurationError for settings there is nothing to look at with."""
    _ = settings.named_endpoint
    transport_of(settings)
    delivery_from(settings)


async def examine_endpoint(settings: Settings, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return the findings; a part that cannot be examined is a finding with the reason."""
    limits = thresholds or Thresholds()

    async def examined(what: str, look: Callable[[Settings, Thresholds], AsyncIterator[Finding]]) -> list[Finding]:
        findings = []
        try:
            async for finding in look(settings, limits):
                findings.append(finding)  # noqa: PERF401 - findings before an error are kept
        except DelaylineError as error:
            findings.append(Finding(what, ok=False, text=str(error)))
        return findings

    findings = [_guarantee(settings), *await examined("connection", _connection)]
    if findings[-1].ok:
        parts = await asyncio.gather(
            examined("rights", _rights),
            examined("database", _database),
            examined("queues", _queues),
            examined("delayed messages", _delayed_messages),
            examined("timeout manager", _timeouts),
            examined("outbox", _outbox),
        )
        findings += [finding for part in parts for finding in part]
    return findings


def _guarantee(settings: Settings) -> Finding:
    try:
        endpoint = endpoint_from(settings)
    except DelaylineError as error:
        return Finding("guarantee", ok=False, text=str(error))
    url = delays_url(settings)
    if url is not None:
        waiting = backend_of(url).native_delays
    else:
        waiting = "a timeout manager" if settings.timeout_manager else "stored delayed delivery"
    parts = f"{type(endpoint.transport).__name__} with {waiting} in {endpoint.transaction_mode.name}"
    return Finding("guarantee", ok=True, text=f"{endpoint.guarantee}: {parts}")


async def _connection(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    backend_of(settings.resolved_store_url).must_exist(settings.resolved_store_url)
    async with open_transport(settings):
        yield Finding("connection", ok=True, text=masked(settings.resolved_transport_url))


async def _rights(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    endpoint = endpoint_from(settings)
    missing: dict[str, None] = {}
    parts: list[object] = [endpoint.transport, endpoint.delayed_delivery, endpoint.draining, endpoint.inbox]
    parts.append(outbox_of(settings))
    for part in parts:
        if isinstance(part, SupportsRightsCheck):
            missing |= dict.fromkeys(await part.missing_rights(endpoint.name, takes=True))
    if missing:
        yield Finding("rights", ok=False, text="\n".join(["run this as the owner of the tables:", *missing]))


async def _database(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    queues = [settings.named_endpoint, settings.error_queue, *satellites_of(settings)]
    uses = uses_of(settings, queues, delays_at=[settings.resolved_store_url, delays_url(settings)])
    options = options_of(settings, two_phase=two_phase_of(settings))
    for url, use in uses.items():
        for what, ok, finding in await backend_of(url).examine(url, options, use):
            yield Finding(what, ok, finding)


async def _queues(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    endpoint = settings.named_endpoint
    async with open_transport(settings) as transport:
        queues = managed_queues(transport)
        listed: Sequence[str] = await transport.queues() if hasattr(transport, "queues") else ()
        for name in dict.fromkeys([endpoint, settings.error_queue, *satellites_of(settings), *listed]):
            try:
                number = await queues.count(name)
            except QueueNotFound:
                finding = f"does not exist. Create it with: delayline setup --endpoint {endpoint}"
                yield Finding(f"queue {name}", ok=False, text=finding)
                continue
            limit = {settings.error_queue: limits.errors, endpoint: limits.queue}.get(name)
            many = limit is not None and number > limit
            finding = f"{number} messages" + (f", more than {limit}" if many else "")
            ok: bool | None = not many
            if name != settings.error_queue:
                receiving, well = await _receiving(transport, name, number)
                finding, ok = f"{finding}; {receiving}", False if many else well
            finding += ": see them with delayline errors list" if number and name == settings.error_queue else ""
            differs = await transport.difference(name) if isinstance(transport, SupportsQueueComparison) else ""
            finding += differs and f"; {differs}"
            yield Finding(f"queue {name}", ok=ok, text=finding, numbers={"messages": number})


async def _receiving(transport: object, queue: str, number: int) -> tuple[str, bool | None]:
    """Return whether a process receives from a queue with so many messages, and whether that is as it should be."""
    why = ""
    if isinstance(transport, SupportsReceiverLookup):
        try:
            if await transport.is_received(queue):
                return "a process receives from it", True
        except DelaylineError as error:
            why = f" ({error})"
        else:
            if not number:
                return "no process receives from it", True
            return "no process receives from it: start the endpoint of this name, with handlers", False
    return f"whether a process receives from it is unknown{why}", None if number else True


async def _delayed_messages(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    unlisted = None if settings.timeout_manager else backend_of(settings.resolved_store_url).unlisted
    if unlisted is not None:
        yield Finding("pending", ok=True, text=unlisted)
        return
    async with open_waiting(settings, timeouts=False) as store:
        now = datetime.now(UTC)
        overdue, later = await _counts(store, now)
        pending = {"messages": overdue.count + later.count}
        yield Finding("pending", ok=True, text=f"{_about(overdue, later)} messages", numbers=pending)
        yield await _overdue(store, now, overdue, limits.overdue)


async def _outbox(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    outbox = outbox_of(settings)
    if outbox is None:
        return
    await outbox.initialize(settings.named_endpoint, TransactionMode.RECEIVE_ONLY)
    try:
        now = datetime.now(UTC)
        finding = await _overdue(outbox, now, (await _counts(outbox, now))[0], limits.overdue)
        yield replace(finding, what="outbox")
    finally:
        await outbox.close()


async def _counts(store: SupportsManagement, now: datetime) -> Sequence[DueBucket]:
    """Return how many messages are overdue, and how many are due later."""
    if isinstance(store, SupportsDueForecast):
        return (await store.due_forecast([now])).buckets
    waiting = sum(bucket.count for bucket in await store.count_by_due(LONGEST_SPAN))
    overdue = sum(bucket.count for bucket in await store.count_by_due(ONE_SECOND) if bucket.start <= now)
    return DueBucket(None, now, overdue), DueBucket(now, None, waiting - overdue)


def _about(*buckets: DueBucket) -> str:
    number = sum(bucket.count for bucket in buckets)
    if any(bucket.at_least for bucket in buckets):
        return f"at least {number}"
    return f"{number}" if all(bucket.exact for bucket in buckets) else f"about {number}"


async def _overdue(store: SupportsManagement, now: datetime, overdue: DueBucket, limit: timedelta) -> Finding:
    first = next(iter(await store.pending(limit=1)), None)
    if first is None or first.due > now:
        finding = "none" if first is None else f"none; the next is due {local(first.due)}, {relative(first.due, now)}"
        return Finding("overdue", ok=True, text=finding, numbers={"messages": 0, "oldest_seconds": 0.0})
    oldest = f"the oldest is {first.id} for {first.destination}, {duration(now - first.due)} overdue"
    stale = now - first.due > limit
    remedy = ". No process dispatches: is an endpoint of this name running?" if stale else ""
    numbers = {"messages": overdue.count, "oldest_seconds": (now - first.due).total_seconds()}
    return Finding("overdue", ok=not stale, text=f"{_about(overdue)} messages; {oldest}{remedy}", numbers=numbers)


async def _timeouts(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    if settings.timeouts_url is None:
        return
    backend_of(settings.timeouts_url).must_exist(settings.timeouts_url)
    async with open_transport(settings) as transport:
        url, name = settings.timeouts_url, settings.named_endpoint
        remains = await remaining_timeouts(url, name, transport, schema=settings.schema)
        yield _drained(remains, settings)
        if remains.without_time:
            yield _without_time(remains)


def _without_time(remains: RemainingTimeouts) -> Finding:
    number = 0 if remains.timeouts is None else remains.timeouts.without_time
    more = ", ..." if number > len(remains.without_time) else ""
    finding = (
        f"{number} in table {remains.table} have no time and are never due: {', '.join(remains.without_time)}{more}. "
        f"{TO_GIVE_A_TIME}"
    )
    return Finding("timeouts without a time", ok=False, text=finding, numbers={"messages": number})


def _drained(remains: RemainingTimeouts, settings: Settings) -> Finding:
    what, disabled, timeouts = "timeout manager", settings.disable_timeout_manager, remains.timeouts
    if not remains.empty:
        number, now = 0 if timeouts is None else timeouts.number, datetime.now(UTC)
        finding = f"{number} timeouts wait, {remains.queued} messages are in its queues"
        first = None if timeouts is None else timeouts.first
        stale = first is not None and now - first > STALE_AFTER
        if disabled:
            finding += ". No process delivers them: take disable_timeout_manager out of the settings"
        elif first is not None:
            finding += f"; the first is due {local(first)}, {relative(first, now)}"
            finding += ". No process dispatches: is an endpoint of this name running?" if stale else ""
        return Finding(what, ok=not (disabled or stale), text=finding)
    keeps_table = timeouts is None or bool(remains.without_time)
    left = [f"queue {name}" for name in remains.queues] + ([] if keeps_table else [f"table {remains.table}"])
    deletable = f"these can be deleted: {', '.join(left)}" if left else "nothing of it is left"
    if disabled:
        return Finding(what, ok=True, text=f"empty and disabled; {deletable}")
    return Finding(what, ok=True, text=f"empty. Set disable_timeout_manager = true; then {deletable}")
