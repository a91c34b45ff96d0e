"""Recurring messages: a row a schedule, whose next occurrence is an ordinary delayed message.

The id of an occurrence is made of the schedule's name and the instant. The transaction that removes an occurrence from
the store locks the schedule's row, and stores the following occurrence if that row still waits for this one: so the
chain goes on once, with any number of pollers, and a process that is killed leaves it as it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast, get_args, runtime_checkable

from delayline.clock import ONE_MINUTE
from delayline.delayed.recurrence import recurrence_of
from delayline.delayed.store import Outcome, SupportsLookup, SupportsManagement, SupportsTransactions
from delayline.errors import BackendUnavailable, ConfigurationError, InvalidMessage
from delayline.events import Event, emit
from delayline.message import (
    MAXIMUM_DESTINATION_LENGTH,
    DelayedMessage,
    Headers,
    Message,
    encode_body,
    from_wire_time,
    to_wire_time,
)
from delayline.shards import SupportsShards
from delayline.transaction import savepoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.delayed.recurrence import Recurrence
    from delayline.message import Body
    from delayline.transaction import Transaction

logger: logging.Logger = logging.getLogger(__name__)

#: What happens to occurrences that could not leave in time, because no process was there to dispatch them: none of them
#: leaves, one does, late, or all of them.
Missed = Literal["none", "one", "all"]
MISSED_CHOICES: Final = get_args(Missed)
#: An occurrence is missed if it leaves later than this.
MISSED_AFTER: Final = ONE_MINUTE
#: An id is a name, `@` and an instant.
MAXIMUM_SCHEDULE_NAME_LENGTH: Final = 200
#: So many former declarations are known.
MOST_SUPERSEDED: Final = 50
#: Tries of a change that meets another's.
MOST_ATTEMPTS: Final = 10
#: Marks an occurrence in the store; as a property of the dispatch it goes no further, and no message without one is
#: looked at for it.
MARK: Final = Headers.DISPATCH_PROPERTIES + "Schedule"
#: Headers that an occurrence has of its own.
OF_OCCURRENCE: Final = (
    Headers.MESSAGE_ID,
    Headers.CORRELATION_ID,
    Headers.CONVERSATION_ID,
    Headers.TIME_SENT,
    Headers.DELIVER_AT,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recurring message."""

    name: str
    """1 to 200 characters, unique in the endpoint."""
    recurrence: str
    """When it is due: a cron expression and its time zone, or an interval as in `every 21600 s`."""
    destination: str
    """The queue it goes to."""
    headers: Mapping[str, str] = field(repr=False)
    """The headers of each occurrence, but for those that differ."""
    body: bytes = field(repr=False)
    """The body of each occurrence."""
    missed: Missed
    """What happens to occurrences that no process was there to dispatch."""
    since: datetime
    """When it began, or its recurrence was changed; intervals count from here."""
    next_at: datetime | None = None
    """When the pending occurrence is due; None while it is paused, and after the last."""
    last_at: datetime | None = None
    """When the last occurrence was due that has left the store."""
    paused: bool = False
    """Whether it is paused."""
    declared: str = ""
    """Fingerprint of the declaration in code; empty for a schedule that was added by hand."""
    superseded: Sequence[str] = field(default=(), repr=False)
    """Fingerprints of declarations that a newer one has replaced, the latest first."""

    def following(self, after: datetime) -> datetime | None:
        """Return the first occurrence after an instant. Raises ConfigurationError or MissingExtra."""
        return recurrence_of(self.recurrence).after(after, self.since)

    def occurrence_id(self, at: datetime) -> str:
        """Return the id of the occurrence at an instant."""
        return f"{self.name}@{at:%Y-%m-%dT%H:%M:%S.%fZ}"

    def message(self, at: datetime, now: datetime, *, is_extra: bool = False) -> DelayedMessage:
        """Return the occurrence at an instant; an extra one is not part of the chain."""
        message_id = self.occurrence_id(at)
        own = dict.fromkeys(OF_OCCURRENCE[:3], message_id)
        own |= {Headers.TIME_SENT: to_wire_time(now), Headers.DELIVER_AT: to_wire_time(at), Headers.SCHEDULE: self.name}
        if not is_extra:
            own[MARK] = f"{to_wire_time(at)} {self.missed}"
        return DelayedMessage(Message(message_id, {**self.headers, **own}, self.body), self.destination, at)


@dataclass(frozen=True, slots=True)
class DueOccurrence:
    """What a message in the store says of the schedule that it is an occurrence of."""

    name: str
    at: datetime
    missed: str

    def is_missed(self, due: datetime, now: datetime) -> bool:
        """Return whether it is too late for it to leave; `due` is later where it was rescheduled, or has failed."""
        return self.missed == "none" and now - due > MISSED_AFTER


def due_occurrence(headers: Mapping[str, str]) -> DueOccurrence | None:
    """Return which occurrence a message is; None for another message, or one whose mark cannot be read."""
    mark, name = headers.get(MARK), headers.get(Headers.SCHEDULE)
    if mark is None or name is None:
        return None
    at, _, missed = mark.rpartition(" ")
    try:
        return DueOccurrence(name, from_wire_time(at), missed)
    except ValueError:
        return None


def fingerprint(schedule: Schedule, headers: Mapping[str, str]) -> str:
    """Return a text that is the same for the same declaration, in every process and version."""
    content = [schedule.recurrence, schedule.destination, schedule.missed, schedule.body.hex(), sorted(headers.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


class ScheduleRows(Protocol):
    """A store's schedules."""

    async def exist(self) -> bool:
        """Return whether there can be any: their table exists."""
        ...

    def require(self) -> None:
        """From now on create what they are kept in with the store's set-up, and check it when the store is opened."""
        ...

    async def all(self) -> Sequence[Schedule]:
        """Return the schedules by name."""
        ...

    async def locked(self, name: str, transaction: Transaction) -> Schedule | None:
        """Return the schedule with that name, or None, locked until the transaction ends."""
        ...

    async def insert(self, schedule: Schedule, transaction: Transaction) -> bool:
        """Keep a new schedule; return False if there is one with its name."""
        ...

    async def update(self, schedule: Schedule, transaction: Transaction) -> None:
        """Replace the schedule with that name, which is locked."""
        ...

    async def delete(self, name: str, transaction: Transaction) -> None:
        """Delete the schedule with that name, which is locked."""
        ...


@runtime_checkable
class SupportsSchedules(Protocol):
    """Capability: the store keeps schedules, whose rows change in its transactions."""

    @property
    def schedules(self) -> ScheduleRows:
        """The schedules."""
        ...


class ScheduledStore(SupportsSchedules, SupportsManagement, SupportsLookup, SupportsTransactions, Protocol):
    """A store that keeps schedules beside their messages."""

    async def store(self, message: DelayedMessage, transaction: Transaction | None = None) -> None:
        """Store a message; see `DelayedMessageStore`."""
        ...


def scheduled(store: object) -> ScheduledStore:
    """Return the store if it keeps schedules, of several shards the first; raises ConfigurationError if not."""
    if isinstance(store, SupportsShards):
        store = next(iter(store.parts.values()))
    if (
        isinstance(store, SupportsSchedules)
        and isinstance(store, SupportsManagement)
        and isinstance(store, SupportsLookup)
        and isinstance(store, SupportsTransactions)
    ):
        return cast("ScheduledStore", store)  # the verbs of a store are checked where it is passed
    raise ConfigurationError(
        f"{type(store).__name__} keeps no schedules: use a StoredDelivery over a SqlDelayedMessageStore or a "
        "MemoryDelayedMessageStore for recurring messages"
    )


class Declared(StrEnum):
    """What became of a declaration."""

    ADDED = "added"
    """There was no schedule with its name."""
    KEPT = "kept"
    """The schedule was declared so before, and is as it was, also where it was changed by hand meanwhile."""
    CHANGED = "changed"
    """The schedule was declared otherwise before."""
    OLDER = "older"
    """A newer declaration has replaced this one before: it changes nothing."""


class Schedules:
    """The recurring messages of an endpoint: list, pause, resume, trigger, change and remove them.

    Args:
        store: The endpoint's store, open.
        clock: The endpoint's clock.
    """

    def __init__(self, store: ScheduledStore, clock: Clock) -> None:
        self._store = store
        self._rows = store.schedules
        self._clock = clock

    def require(self) -> None:
        """Create what schedules are kept in with the set-up of the store, and check it when the store is opened."""
        self._rows.require()

    async def list(self) -> Sequence[Schedule]:
        """Return the schedules by name.

        Raises:
            BackendUnavailable: The back end did not answer.
        """
        return await self._rows.all() if await self._rows.exist() else ()

    async def get(self, name: str) -> Schedule:
        """Return a schedule.

        Args:
            name: Its name.

        Returns:
            The schedule.

        Raises:
            ConfigurationError: There is no such schedule.
        """
        async with self._store.transaction() as transaction:
            return await self._known(name, transaction)

    async def add(self, schedule: Schedule) -> Schedule:
        """Add a schedule by hand, and store its first occurrence.

        Args:
            schedule: The schedule.

        Returns:
            The schedule as it is now.

        Raises:
            InvalidMessage: There is a schedule with its name.
        """
        begun = self._with_following(schedule)
        async with self._store.transaction() as transaction:
            if not await self._rows.insert(begun, transaction):
                problem = "already: change it, remove it first, or give the new one another name"
                raise InvalidMessage(f"there is a schedule {schedule.name!r} {problem}")
            await self._store_next(begun, transaction)
        emit(logger, logging.INFO, Event.SCHEDULE_CHANGED, "schedule %s was added", begun.name, schedule=begun.name)
        return begun

    async def pause(self, name: str) -> Schedule:
        """Pause a schedule: its pending occurrence is cancelled, and none follows until `resume`. Idempotent.

        Args:
            name: Its name.

        Returns:
            The schedule as it is now.

        Raises:
            ConfigurationError: There is no such schedule.
        """

        async def pause(schedule: Schedule, transaction: Transaction) -> Schedule:
            left = await self._withdraw(schedule, transaction)
            return replace(left, paused=True, next_at=None)

        return await self._change(name, pause)

    async def resume(self, name: str) -> Schedule:
        """Resume a schedule that is paused, from now on: what was due meanwhile does not leave. Idempotent.

        Args:
            name: Its name.

        Returns:
            The schedule as it is now.

        Raises:
            ConfigurationError: There is no such schedule.
            MissingExtra: Its cron expression needs the extra `cron`.
        """

        async def resume(schedule: Schedule, transaction: Transaction) -> Schedule:
            if not schedule.paused:
                return schedule
            return await self._store_next(self._with_following(replace(schedule, paused=False)), transaction)

        return await self._change(name, resume)

    async def trigger(self, name: str) -> str:
        """Send an occurrence now, besides those of the schedule; also while it is paused.

        Args:
            name: The schedule's name.

        Returns:
            The message's id.

        Raises:
            ConfigurationError: There is no such schedule.
        """
        message_id = ""

        async def trigger(schedule: Schedule, transaction: Transaction) -> Schedule:
            nonlocal message_id
            now = self._clock.now()
            message = schedule.message(now, now, is_extra=True)
            message_id = message.id
            await self._store.store(message, transaction)
            return schedule

        await self._change(name, trigger)
        return message_id

    async def change(
        self,
        name: str,
        *,
        recurrence: Recurrence | None = None,
        destination: str | None = None,
        body: Body | None = None,
        missed: Missed | None = None,
    ) -> Schedule:
        """Change a schedule and its pending occurrence; it stays so until its declaration in code changes.

        Args:
            name: Its name.
            recurrence: When it is due, `cron(...)` or `interval(...)`.
            destination: The queue that it goes to.
            body: The body: bytes, text, or a value to be written as JSON.
            missed: What happens to occurrences that no process was there to dispatch.

        Returns:
            The schedule as it is now.

        Raises:
            ConfigurationError: There is no such schedule, or an argument is invalid.
        """
        changes: dict[str, object] = {}
        if recurrence is not None:
            changes |= {"recurrence": str(recurrence), "since": self._clock.now()}
        if destination is not None:
            changes["destination"] = checked_name("destination", destination, MAXIMUM_DESTINATION_LENGTH)
        if missed is not None:
            changes["missed"] = checked_missed(missed)
        encoded = None if body is None else encode_body(body)

        async def change(schedule: Schedule, transaction: Transaction) -> Schedule:
            changed = replace(schedule, **changes)  # type: ignore[arg-type]
            if encoded is not None:
                headers = {**changed.headers, Headers.CONTENT_TYPE: encoded[1]}
                changed = replace(changed, body=encoded[0], headers=headers)
            return await self._replaced(schedule, changed, transaction)

        return await self._change(name, change)

    async def remove(self, name: str) -> None:
        """Remove a schedule and cancel its pending occurrence; declared in code, it comes back at the next start.

        Args:
            name: Its name.

        Raises:
            ConfigurationError: There is no such schedule.
        """
        async with self._store.transaction() as transaction:
            schedule = await self._known(name, transaction)
            await self._withdraw(schedule, transaction)
            await self._rows.delete(name, transaction)
        emit(logger, logging.INFO, Event.SCHEDULE_CHANGED, "schedule %s was removed", name, schedule=name)

    async def declare(self, schedule: Schedule) -> Declared:
        """Add a schedule, or change it to this declaration unless a newer one has replaced that before.

        A declaration that was never made before is newer than any that was. So versions of a program that run side by
        side come to the same end, whichever starts, or restarts, last.
        """
        for _ in range(MOST_ATTEMPTS):
            async with self._store.transaction() as transaction:
                before = await self._rows.locked(schedule.name, transaction)
                if before is None:
                    begun = self._with_following(schedule)
                    if not await self._rows.insert(begun, transaction):
                        continue
                    await self._store_next(begun, transaction)
                    declared = Declared.ADDED
                elif before.declared == schedule.declared:
                    declared = Declared.KEPT
                elif schedule.declared in before.superseded:
                    declared = Declared.OLDER
                else:
                    declared = Declared.CHANGED
                    known = [before.declared, *before.superseded] if before.declared else before.superseded
                    same = before.recurrence == schedule.recurrence
                    changed = replace(
                        schedule,
                        since=before.since if same else schedule.since,
                        paused=before.paused,
                        next_at=before.next_at,
                        last_at=before.last_at,
                        superseded=tuple(known)[:MOST_SUPERSEDED],
                    )
                    await self._rows.update(await self._replaced(before, changed, transaction), transaction)
            self._log_declared(schedule, declared)
            return declared
        raise BackendUnavailable(f"schedule {schedule.name!r} was added and removed by others while it was declared")

    async def advance(self, occurrences: Sequence[DueOccurrence], transaction: Transaction | None) -> None:
        """Store what follows the occurrences, which leave the store in the transaction, or afterwards where None.

        What cannot be done for a schedule is logged, and tried again by `mend`; raises BackendUnavailable.
        """
        for occurrence in sorted(occurrences, key=lambda each: (each.name, each.at)):
            try:
                if transaction is None:
                    async with self._store.transaction() as own:
                        await self._advance(occurrence, own)
                else:
                    async with savepoint(transaction):
                        await self._advance(occurrence, transaction)
            except BackendUnavailable:
                raise
            except Exception as error:
                self._log_failed(occurrence.name, error)

    async def mend(self) -> None:
        """Let schedules go on whose pending occurrence is gone: it was cancelled, or what follows could not be told."""
        now = self._clock.now()
        for schedule in await self.list():
            if schedule.paused or schedule.next_at is None:
                continue
            if now - schedule.next_at <= ONE_MINUTE or await self._is_pending(schedule, schedule.next_at):
                continue
            try:
                async with self._store.transaction() as transaction:
                    await self._advance(DueOccurrence(schedule.name, schedule.next_at, schedule.missed), transaction)
            except Exception as error:
                self._log_failed(schedule.name, error)

    async def _is_pending(self, schedule: Schedule, at: datetime) -> bool:
        return await self._store.find(schedule.occurrence_id(at), body_limit=0) is not None

    async def _advance(self, occurrence: DueOccurrence, transaction: Transaction) -> None:
        schedule = await self._rows.locked(occurrence.name, transaction)
        if schedule is None or schedule.paused or schedule.next_at != occurrence.at:
            return  # another process has done this, or the schedule was changed meanwhile
        left = replace(schedule, last_at=occurrence.at)
        after = occurrence.at if left.missed == "all" else max(occurrence.at, self._clock.now())
        following = replace(left, next_at=left.following(after))
        await self._rows.update(await self._store_next(following, transaction), transaction)

    def _with_following(self, schedule: Schedule) -> Schedule:
        """Return the schedule as it waits for its first occurrence from now on."""
        now = self._clock.now()
        after = now if schedule.last_at is None else max(now, schedule.last_at)
        return replace(schedule, next_at=schedule.following(after))

    async def _store_next(self, schedule: Schedule, transaction: Transaction) -> Schedule:
        """Store the occurrence that a schedule waits for, and return the schedule."""
        if schedule.next_at is not None:
            await self._store.store(schedule.message(schedule.next_at, self._clock.now()), transaction)
        return schedule

    async def _withdraw(self, schedule: Schedule, transaction: Transaction) -> Schedule:
        """Cancel the pending occurrence; if it is leaving now, none before it follows."""
        at = schedule.next_at
        if at is None:
            return schedule
        outcome = await self._store.cancel(schedule.occurrence_id(at), transaction)
        return schedule if outcome is Outcome.DONE else replace(schedule, next_at=None, last_at=at)

    async def _replaced(self, before: Schedule, changed: Schedule, transaction: Transaction) -> Schedule:
        """Replace the pending occurrence by that of the changed schedule, due as before if its times are the same."""
        left = await self._withdraw(before, transaction)
        changed = replace(changed, last_at=left.last_at, next_at=None)
        if changed.paused:
            return changed
        if changed.recurrence == before.recurrence and left.next_at is not None:
            return await self._store_next(replace(changed, next_at=left.next_at), transaction)
        return await self._store_next(self._with_following(changed), transaction)

    async def _change(self, name: str, change: Callable[[Schedule, Transaction], Awaitable[Schedule]]) -> Schedule:
        async with self._store.transaction() as transaction:
            schedule = await self._known(name, transaction)
            changed = await change(schedule, transaction)
            if changed != schedule:
                await self._rows.update(changed, transaction)
        if changed != schedule:
            log_text = "schedule %s was changed; its next occurrence is at %s"
            emit(logger, logging.INFO, Event.SCHEDULE_CHANGED, log_text, name, changed.next_at, schedule=name)
        return changed

    async def _known(self, name: str, transaction: Transaction) -> Schedule:
        schedule = await self._rows.locked(name, transaction) if await self._rows.exist() else None
        if schedule is None:
            names = ", ".join(repr(each.name) for each in (await self.list())[:10]) or "none"
            raise ConfigurationError(f"there is no schedule {name!r}: the schedules of this endpoint are {names}")
        return schedule

    def _log_declared(self, schedule: Schedule, declared: Declared) -> None:
        if declared is Declared.OLDER:
            log_text = (
                "schedule %s is declared here as it was before a newer declaration has replaced that: this process "
                "runs an older version, and leaves it as it is. To go back on purpose, run: delayline schedules remove"
            )
            emit(logger, logging.WARNING, Event.SCHEDULE_OLDER, log_text, schedule.name, schedule=schedule.name)
        elif declared is not Declared.KEPT:
            log_text = "schedule %s is declared: %s (%s)"
            emit(
                logger,
                logging.INFO,
                Event.SCHEDULE_CHANGED,
                log_text,
                schedule.name,
                schedule.recurrence,
                declared,
                schedule=schedule.name,
            )

    def _log_failed(self, name: str, error: Exception) -> None:
        log_text = "What follows an occurrence of schedule %s cannot be stored, it is tried again every minute: %s"
        emit(logger, logging.ERROR, Event.SCHEDULE_FAILED, log_text, name, error, exception=error, schedule=name)


def checked_missed(missed: str) -> Missed:
    """Return what happens to missed occurrences. Raises ConfigurationError."""
    if missed not in MISSED_CHOICES:
        raise ConfigurationError(f"missed must be 'none', 'one' or 'all', not {missed!r}")
    return missed  # type: ignore[return-value]


def checked_name(what: str, name: str, longest: int = MAXIMUM_SCHEDULE_NAME_LENGTH) -> str:
    """Return a name that a back end keeps as it is. Raises InvalidMessage."""
    if not isinstance(name, str) or not 1 <= len(name) <= longest:
        length = f", and has {len(name)}" if isinstance(name, str) else ""
        raise InvalidMessage(f"{what} must be a text of 1 to {longest} characters{length}: {str(name)[:40]!r}")
    if not name.isprintable() or name != name.strip():
        raise InvalidMessage(f"{what} {name!r} has control characters, or spaces around it: remove them")
    return name
