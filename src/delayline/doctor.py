"""Checks an endpoint's connection, rights, tables, queues and pending messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
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
from delayline.delayed.pauses import SupportsDispatchPauses
from delayline.delayed.store import DueBucket, SupportsDueForecast, SupportsRightsCheck
from delayline.errors import BackendUnavailable, DelaylineError
from delayline.masking import masked
from delayline.opening import open_transport, open_waiting
from delayline.queue_states import states_of
from delayline.readable import duration, local, relative
from delayline.receiving.pipeline import OLDEST_HANDLER
from delayline.timeouts.draining import remaining_timeouts
from delayline.timeouts.persister import TO_GIVE_A_TIME
from delayline.transaction import TransactionMode
from delayline.transport import SupportsQueueComparison, SupportsQueueLookup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from delayline.delayed.store import SupportsManagement
    from delayline.settings import Settings
    from delayline.timeouts.draining import RemainingTimeouts
    from delayline.transport import QueueState

#: A message overdue for longer means that no poller dispatches.
STALE_AFTER: Final = timedelta(seconds=10)
LONGEST_SPAN: Final = timedelta(days=365_000)
#: A minute row that is older is not of a process that still runs, or of one that cannot write.
LATEST_ROW: Final = timedelta(minutes=3)
CONNECTION: Final = "connection"
#: Queues without a problem that are shown, beside the endpoint's own.
MOST_SHOWN: Final = 100


class State(StrEnum):
    """The result of a check, or of several: the worst of them."""

    OK = "ok"
    """All is as it should be."""
    PROBLEM = "problem"
    """Something is wrong, or a number is above its limit."""
    NOT_CHECKED = "not checked"
    """It could not be looked at: a right is missing, nothing answered, or the back end cannot tell."""

    @classmethod
    def of(cls, ok: bool | None) -> State:
        """Return the state of a back end's finding; None for what could not be looked at."""
        return cls.NOT_CHECKED if ok is None else cls.OK if ok else cls.PROBLEM


@dataclass(frozen=True, slots=True)
class Finding:
    """What an examination found about a subject."""

    what: str
    state: State
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers in the text, by name: `messages`, `oldest_seconds`."""


def worst(findings: Sequence[Finding]) -> State:
    """Return the state of all findings together: a problem before what was not checked."""
    states = {finding.state for finding in findings}
    return next((state for state in (State.PROBLEM, State.NOT_CHECKED) if state in states), State.OK)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers above which an endpoint is not healthy."""

    overdue: timedelta = STALE_AFTER
    """How long the oldest pending message may be overdue."""
    errors: int = 0
    """How many messages may be in the error queue: from the first on, somebody waits for what was not done."""
    queue: int | None = None
    """How many messages may be in the endpoint's queue; None for any number."""
    handler: timedelta = timedelta(minutes=10)
    """For how long a handler may run, as minute rows tell."""


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
        except BackendUnavailable as error:  # it was reached before: what could not be looked at may be well
            state = State.PROBLEM if what == CONNECTION else State.NOT_CHECKED
            findings.append(
                Finding(what, state, text=f"not looked at: {error}" if state is State.NOT_CHECKED else str(error))
            )
        except DelaylineError as error:
            findings.append(Finding(what, state=State.PROBLEM, text=str(error)))
        return findings

    findings = [_guarantee(settings), *await examined(CONNECTION, _connection)]
    if findings[-1].state is State.OK:
        parts = await asyncio.gather(
            examined("rights", _rights),
            examined("database", _database),
            examined("queues", _queues),
            examined("delayed messages", _delayed_messages),
            examined("timeout manager", _timeouts),
            examined("outbox", _outbox),
            examined("handlers", _handlers),
        )
        findings += [finding for part in parts for finding in part]
    return findings


def _guarantee(settings: Settings) -> Finding:
    try:
        endpoint = endpoint_from(settings)
    except DelaylineError as error:
        return Finding("guarantee", state=State.PROBLEM, text=str(error))
    url = delays_url(settings)
    if url is not None:
        waiting = backend_of(url).native_delays
    else:
        waiting = "a timeout manager" if settings.timeout_manager else "stored delayed delivery"
    parts = f"{type(endpoint.transport).__name__} with {waiting} in {endpoint.transaction_mode.name}"
    return Finding("guarantee", state=State.OK, text=f"{endpoint.guarantee}: {parts}")


async def _connection(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    backend_of(settings.resolved_store_url).must_exist(settings.resolved_store_url)
    async with open_transport(settings):
        yield Finding(CONNECTION, state=State.OK, text=masked(settings.resolved_transport_url))


async def _rights(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    endpoint = endpoint_from(settings)
    missing: dict[str, None] = {}
    parts: list[object] = [endpoint.transport, endpoint.delayed_delivery, endpoint.draining, endpoint.inbox]
    parts.append(outbox_of(settings))
    for part in parts:
        if isinstance(part, SupportsRightsCheck):
            missing |= dict.fromkeys(await part.missing_rights(endpoint.name, takes=True))
    if missing:
        yield Finding("rights", state=State.PROBLEM, text="\n".join(["run this as the owner of the tables:", *missing]))


async def _database(settings: Settings, _: Thresholds) -> AsyncIterator[Finding]:
    queues = [settings.named_endpoint, settings.error_queue, *satellites_of(settings)]
    uses = uses_of(settings, queues, delays_at=[settings.resolved_store_url, delays_url(settings)])
    options = options_of(settings, two_phase=two_phase_of(settings))
    for url, use in uses.items():
        for what, ok, finding in await backend_of(url).examine(url, options, use):
            yield Finding(what, State.of(ok), finding)


async def _queues(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    own = [settings.named_endpoint, settings.error_queue, *satellites_of(settings)]
    async with open_transport(settings) as transport:
        listed = await transport.queues() if isinstance(transport, SupportsQueueLookup) else ()
        names = list(dict.fromkeys([*own, *listed]))
        states = await states_of(transport, names)
        shown = left_out = 0
        for name in names:
            if name not in states:
                text = f"does not exist. Create it with: delayline setup --endpoint {settings.named_endpoint}"
                if name in own:  # others were removed a moment ago
                    yield Finding(f"queue {name}", state=State.PROBLEM, text=text)
                continue
            finding = _queue(states[name], settings, limits)
            if name not in own and finding.state is State.OK:
                shown += 1
                left_out += shown > MOST_SHOWN
                if shown > MOST_SHOWN:
                    continue
            if isinstance(transport, SupportsQueueComparison) and (differs := await transport.difference(name)):
                finding = replace(finding, text=f"{finding.text}; {differs}")
            yield finding
        if left_out:
            yield Finding("further queues", state=State.OK, text=f"{left_out} more, of which none has a problem")


def _queue(state: QueueState, settings: Settings, limits: Thresholds) -> Finding:
    """Return what there is to say of a queue."""
    name, number = state.queue, state.messages
    what, is_error_queue = f"queue {name}", name == settings.error_queue
    limit = {settings.error_queue: limits.errors, settings.named_endpoint: limits.queue}.get(name)
    if number is None:
        return Finding(what, state=State.NOT_CHECKED, text="how many messages it has is unknown")
    texts, found = [f"{number} messages"], State.OK
    if limit is not None and number > limit:
        texts, found = [f"{number} messages, more than {limit}"], State.PROBLEM
    if is_error_queue and number:
        texts[0] += ": see them with delayline errors list"
    if not is_error_queue:
        if state.paused:
            texts.append(f"it is paused: delayline resume {name}")
            found = State.PROBLEM
        text, received = _receiving(state)
        texts.append(text)
        found = found if found is State.PROBLEM else received
    return Finding(what, found, "; ".join(texts), {"messages": number})


def _receiving(state: QueueState) -> tuple[str, State]:
    """Return whether a process receives from a queue, and whether that is as it should be."""
    if state.received is None:
        return "whether a process receives from it is unknown", State.NOT_CHECKED if state.messages else State.OK
    if state.received:
        return "a process receives from it", State.OK
    if not state.messages:
        return "no process receives from it", State.OK
    return "no process receives from it: start the endpoint of this name, with handlers", State.PROBLEM


async def _delayed_messages(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    url = settings.resolved_store_url
    unlisted = None if settings.timeout_manager else backend_of(url).unlisted
    if unlisted is not None:
        counted = await backend_of(url).count_pending(url)
        number = sum(within.count for within in counted)
        state, text = (State.OK, f"{number} messages") if counted else (State.NOT_CHECKED, "not counted")
        yield Finding("pending", state, f"{text}, {unlisted}", {"messages": number} if counted else {})
        return
    async with open_waiting(settings, timeouts=False) as store:
        now = datetime.now(UTC)
        overdue, later = await _counts(store, now)
        pending = {"messages": overdue.count + later.count}
        yield Finding("pending", state=State.OK, text=f"{_about(overdue, later)} messages", numbers=pending)
        pauses = await store.dispatch_pauses.all() if isinstance(store, SupportsDispatchPauses) else []
        for pause in pauses:
            which = "--dispatch-all" if pause.destination is None else f"--dispatch {pause.destination}"
            finding = f"paused since {local(pause.since)}. Go on with: delayline resume {which}"
            yield Finding(pause.text, State.PROBLEM, text=finding)
        yield await _overdue(store, now, overdue, limits.overdue, {pause.destination for pause in pauses})


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


async def _handlers(settings: Settings, limits: Thresholds) -> AsyncIterator[Finding]:
    """Yield for how long handlers run: their processes write it to minute rows."""
    if not settings.history:
        return
    from delayline.sql.databases import database_at
    from delayline.telemetry.history import read_minutes

    database, name = database_at(settings.resolved_store_url), settings.named_endpoint
    schema = database.dialect.catalog.schema_of(settings.schema)
    await database.open()
    try:
        now = database.clock.now()
        rows = await database.read(
            lambda connection: read_minutes(connection, schema, name, now - LATEST_ROW, now + LATEST_ROW)
        )
    finally:
        await database.close()
    latest = {row.process: row for row in rows or ()}
    if not latest:
        text = f"no process has written a minute row for {duration(LATEST_ROW)}: is an endpoint of this name running?"
        yield Finding("handlers", State.NOT_CHECKED, text=text)
        return
    process, row = max(latest.items(), key=lambda item: item[1].measures.get(OLDEST_HANDLER, 0.0))
    oldest = timedelta(seconds=row.measures.get(OLDEST_HANDLER, 0.0))
    running = sum(each.running_handlers for each in latest.values())
    text = f"{running} messages are handled, in {len(latest)} processes"
    if oldest:
        text += f"; the oldest for {duration(oldest)}, in {process} at {local(row.written)}"
    stuck = oldest > limits.handler
    numbers = {"messages": running, "oldest_seconds": oldest.total_seconds()}
    yield Finding("handlers", State.PROBLEM if stuck else State.OK, text=text, numbers=numbers)


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


async def _overdue(
    store: SupportsManagement,
    now: datetime,
    overdue: DueBucket,
    limit: timedelta,
    paused: Collection[str | None] = (),
) -> Finding:
    first = next(iter(await store.pending(limit=1)), None)
    if first is None or first.due > now:
        finding = "none" if first is None else f"none; the next is due {local(first.due)}, {relative(first.due, now)}"
        return Finding("overdue", state=State.OK, text=finding, numbers={"messages": 0, "oldest_seconds": 0.0})
    oldest = f"the oldest is {first.id} for {first.destination}, {duration(now - first.due)} overdue"
    if None in paused or first.destination in paused:
        about = f"{_about(overdue)} messages; {oldest}, and paused: it is not known whether others are late"
        return Finding("overdue", State.NOT_CHECKED, text=about, numbers={"messages": overdue.count})
    stale = now - first.due > limit
    remedy = ". No process dispatches: is an endpoint of this name running?" if stale else ""
    numbers = {"messages": overdue.count, "oldest_seconds": (now - first.due).total_seconds()}
    state = State.PROBLEM if stale else State.OK
    return Finding("overdue", state, text=f"{_about(overdue)} messages; {oldest}{remedy}", numbers=numbers)


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
    return Finding("timeouts without a time", state=State.PROBLEM, text=finding, numbers={"messages": number})


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
        return Finding(what, State.PROBLEM if disabled or stale else State.OK, text=finding)
    keeps_table = timeouts is None or bool(remains.without_time)
    left = [f"queue {name}" for name in remains.queues] + ([] if keeps_table else [f"table {remains.table}"])
    deletable = f"these can be deleted: {', '.join(left)}" if left else "nothing of it is left"
    if disabled:
        return Finding(what, state=State.OK, text=f"empty and disabled; {deletable}")
    return Finding(what, state=State.OK, text=f"empty. Set disable_timeout_manager = true; then {deletable}")
