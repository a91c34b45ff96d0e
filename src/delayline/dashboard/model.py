"""Values that the pages of the dashboard show: frozen, without behaviour, made by the modules of the pages.

A part that a back end cannot show, or cannot show now, is an `Unavailable` with its reason. Texts from messages are
untrusted: they may contain anything, and are cut to the lengths that are given here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delayline.actions import ActionRecord
from delayline.delayed.store import DueBucket

if TYPE_CHECKING:
    from delayline.backends import DueBy, DueWithin
    from delayline.delayed.pauses import DispatchPause
    from delayline.places import MessageMatch
    from delayline.telemetry.history import MinuteRow
    from delayline.transport import QueueLimits


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a part of a page cannot be shown."""

    reason: str
    """A sentence for people, without secrets."""
    temporary: bool = False
    """Whether trying again may help: the back end does not answer now, or not in time."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process of an endpoint, by its last minute row."""

    row: MinuteRow
    alive: bool
    """Whether the row was written within the last three minutes."""


@dataclass(frozen=True, slots=True)
class DueCounts:
    """How many messages are due when."""

    overdue: DueBucket
    """Those that are not paused."""
    paused: DueBucket
    """Overdue, and held back by a pause of dispatching."""
    next_minute: DueBucket
    next_hour: DueBucket
    """From a minute from now to an hour from now."""
    next_day: DueBucket
    """From an hour from now to a day from now."""
    later: DueBucket
    earliest: datetime | None
    """The earliest due time of what is not paused; past while a message is overdue."""
    pauses: Sequence[DispatchPause] | None = ()
    """None where the user may not read them: `overdue` has what is paused then."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates and lateness of the last minutes, over all processes that write minute rows."""

    since: datetime
    handled_a_second: float
    failed_a_second: float
    dispatched_a_second: float
    lateness_p50: float | None
    """Seconds; None if nothing was dispatched."""
    lateness_p99: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What all processes did in each of successive minutes; None for a minute of which no process has a row."""

    start: datetime
    """The first minute."""
    dispatched: Sequence[int | None]
    handled: Sequence[int | None]
    failed: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue: how many messages it has, and its limits."""

    name: str
    messages: int | Unavailable
    limits: QueueLimits


@dataclass(frozen=True, slots=True)
class LevelForecast:
    """When the messages of delay levels are due, as far as the levels tell it."""

    total: int
    levels: Sequence[DueWithin]
    """The shortest first."""
    due: Sequence[DueBy]
    """How many are due by the end of each span, at least and at most."""


@dataclass(frozen=True, slots=True)
class Now:
    """The page `Now` for an endpoint; each part is unavailable by itself."""

    at: datetime
    due: DueCounts | Unavailable
    throughput: Throughput | Unavailable
    rates: Rates | Unavailable
    """Of the last minutes."""
    processes: Sequence[ProcessState] | Unavailable
    queues: Sequence[QueueState] | Unavailable
    errors: int | Unavailable
    """How many messages the error queue has."""
    levels: LevelForecast | Unavailable | None
    """The delay levels within a minute, an hour and a day; None where no messages wait in levels."""


@dataclass(frozen=True, slots=True)
class ForecastBar:
    """A bucket of due times in the picture."""

    start: datetime | None
    """None for overdue messages."""
    end: datetime | None
    """None for all that is later."""
    hot: int
    """In the store."""
    cold: int
    """In the cold tier."""
    exact: bool
    at_least: bool
    """Whether there may be more, uncounted."""
    destinations: Mapping[str, int]
    """By destination, the largest first; beyond the first 10 together as `(other)`."""
    capacity: float | None
    """How many messages the measured drain rate delivers in the bucket's time; None if unknown or unbounded."""
    exceeds: bool
    """Whether the bucket has more messages than its capacity."""

    @property
    def count(self) -> int:
        """The messages of both tiers."""
        return self.hot + self.cold


@dataclass(frozen=True, slots=True)
class Forecast:
    """The due times of pending messages."""

    at: datetime
    span: str
    """The name of the zoom: `hour`, `day`, `week`, `month`, `year` or `all`."""
    bars: Sequence[ForecastBar]
    """The overdue first; the last one is open."""
    drain_rate: float | Unavailable
    """Messages a second that were measured: the most in two successive minutes of the last day that had a backlog."""
    destinations: Sequence[str]
    """All destinations in the bars, the largest first."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """The heat map: time against lateness."""

    start: datetime
    step: timedelta
    """The width of a column."""
    bounds: Sequence[float]
    """The upper bounds of the rows in seconds; one row more than bounds, the last one unbounded."""
    counts: Sequence[Sequence[int]]
    """By column and row: `counts[column][row]`."""
    destination: str | None
    """The destination that is shown; None for all."""
    destinations: Sequence[str]
    """Those that there is data for, by name."""
    p50: Sequence[float | None]
    """By column, in seconds."""
    p99: Sequence[float | None]
    uncounted: int
    """Dispatched messages of the time span whose lateness the store did not report."""


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A pending message in a list."""

    id: str
    destination: str
    due: datetime
    retries: int
    message_type: str
    """Empty if it has none, or headers that cannot be read."""
    size: int
    """Bytes of headers and body."""


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Messages that a search found, earliest due first."""

    rows: Sequence[PendingRow]
    looked_at: int
    """How many messages the search looked through."""
    complete: bool
    """Whether there are no more than these."""
    next_offset: int | None
    """How many messages of `next_after` to skip when searching on; None when complete."""
    next_after: datetime | None
    """The due time to search on from."""
    cut: bool = False
    """Whether the search time was used up before the page was full."""
    total: DueBucket | None = None
    """If so, how many messages there were to look through; None if the back end cannot count them."""


@dataclass(frozen=True, slots=True)
class Body:
    """A message's body, as far as it is shown."""

    size: int
    """In bytes, before cutting."""
    kind: str
    """`json`, `text`, `binary` or `empty`."""
    text: str
    """Indented JSON, the text, or a hex dump."""
    cut: bool
    """Whether the text is the beginning only."""


@dataclass(frozen=True, slots=True)
class HeaderRow:
    """A header of a message."""

    name: str
    value: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class EditableMessage:
    """A failed message as the fields of a form, which give back the same bytes where they are not edited."""

    to: str
    headers: str
    """A header a line, without those that describe the failure."""
    body: str
    marks: str
    """What the body has beside its text: `bom`, `crlf`, both or none."""


@dataclass(frozen=True, slots=True)
class MessageDetails:
    """A message with headers and body."""

    id: str
    destination: str
    due: datetime | None
    """None for a message of a queue."""
    retries: int
    headers: Sequence[HeaderRow]
    damaged: str | None
    """Why the headers cannot be read; None if they can."""
    body: Body
    message_type: str
    editable: EditableMessage | None = None
    """The message as fields of a form; None where a form would change it."""


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """The result of an action on a message."""

    id: str
    done: bool
    text: str
    """What happened, or why not: `done`, `too late: it is being sent now`, or a reason."""


@dataclass(frozen=True, slots=True)
class Preview:
    """How many messages an action on all that match would change."""

    number: int
    exact: bool
    """Whether they were counted; else the number is an estimate."""
    at_least: bool
    """Whether there may be more: the back end can only count the first ones."""
    example: Sequence[str]
    """Ids of the first ones."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Messages of a group that failed in the same queue and are of the same type."""

    queue: str
    """The queue they failed in; empty if unknown."""
    message_type: str
    count: int
    new: int


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Messages of the error queue that failed with the same exception at the same place."""

    key: str
    """Identifies the group in requests; the same while the failures are."""
    exception_type: str
    place: str
    """The first frame of the user's own code in the stack trace: `handlers.py:17 in handle`; or empty."""
    count: int
    new: int
    """How many of them have failed since the time that was asked for."""
    first: datetime | None
    last: datetime | None
    example: str
    """The exception's text of the newest one, cut."""
    by_day: Mapping[str, int]
    """How many failed on each day, `2026-05-01`."""
    kinds: Sequence[ErrorKind]
    """The same by queue and type, the largest first."""


@dataclass(frozen=True, slots=True)
class ErrorsRead:
    """How much of the error queue is known."""

    queue: str
    total: int
    """How many messages the queue has."""
    read: int
    """How many of them were read; what is shown is of these."""
    reading: bool
    """Whether reading goes on."""
    newest: bool
    """Whether these are the newest; of a broker they are the oldest."""

    @property
    def text(self) -> str:
        """What is shown, if it is not all, as a person reads it."""
        if self.reading:
            return f"the newest {self.read:,} of {self.total:,} are read so far: load the page again for more"
        if self.read >= self.total:
            return ""
        which = "newest" if self.newest else "oldest"
        why = "" if self.newest else ": this back end does not show those behind them"
        return f"of the {which} {self.read:,} of {self.total:,}{why}"


@dataclass(frozen=True, slots=True)
class ErrorGroups:
    """The error queue, grouped."""

    known: ErrorsRead
    matching: int
    """How many of the messages that were read fulfil the filter."""
    new: int
    """How many of these have failed since the time that was asked for."""
    latest: datetime | None
    """When the last message of the queue failed."""
    number: int
    """How many groups there are."""
    groups: Sequence[ErrorGroup]
    next_after: str | None
    """The key of the last group, to see those behind it; None if there are no more."""
    days: Sequence[str]
    """The days of the trend, the last one is today."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A failed message in a list."""

    id: str
    failed_at: datetime | None
    queue: str
    """The queue it failed in; empty if unknown, so that it cannot be retried without naming one."""
    exception_type: str
    exception_text: str
    """Cut."""
    message_type: str


@dataclass(frozen=True, slots=True)
class ErrorPage:
    """Failed messages that fulfil a filter, the newest first."""

    known: ErrorsRead
    rows: Sequence[ErrorRow]
    matching: int | None
    """How many messages fulfil the filter; None where each would have to be read."""
    looked_at: int
    """How many messages were looked through."""
    next_before: int | None
    """The number to go on below; None if there are no more."""
    cut: bool
    """Whether the search time was used up before the page was full."""


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """An event in a message's life."""

    at: datetime
    event: str
    """One of `delayline.sql.journal.JournalEvent`, `pending`, or `in the error queue`."""
    destination: str
    due: datetime | None
    retries: int
    endpoint: str
    """The endpoint that it waited in."""


@dataclass(frozen=True, slots=True)
class UnsearchedPlace:
    """A place in which no message was looked for."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundPage:
    """What a search has found in a moment."""

    matches: Sequence[MessageMatch]
    looked_at: int
    """About how many messages were looked through."""
    share: float
    """About how far through all places the search is, from 0 to 1."""
    position: str | None
    """Where it goes on; None when it is through."""
    searched: Sequence[str]
    """The places that were searched to their end."""
    left_out: Sequence[UnsearchedPlace]
    """Places in which no message can match."""
    unsearched: Sequence[UnsearchedPlace]
    """Places that could not be searched."""
    is_cut: bool
    """Whether the time was used up."""


@dataclass(frozen=True, slots=True)
class MessageLife:
    """The recorded events of a message, earliest first."""

    id: str
    events: Sequence[LifeEvent]
    pending: PendingRow | None
    """The message, while it waits."""
    failed: ErrorRow | None
    """The message, while it is in the error queue."""
    elsewhere: Sequence[MessageMatch]
    """Where it is in queues, and pending in other endpoints."""
    unsearched: Sequence[UnsearchedPlace]
    """Where it may be besides: places that could not be searched."""
    journal: str | None
    """Why there is no journal; None if there is one."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job of the pipeline, by its tables."""

    kind: str
    """`schedule`, `dispatcher` or `migration`."""
    name: str
    state: str
    started: datetime | None
    finished: datetime | None
    total: int | None
    """How many rows it has to work on; None if unknown."""
    done: int | None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ColdDay:
    """The files of the cold tier whose messages are due on a day."""

    day: str
    """`2026-05-01`"""
    hours: Mapping[str, int]
    """How many messages wait in files, by the hour they are due: `09:00`, earliest first."""
    files: int
    """Those that are held."""
    promoted: int
    """Messages that have been promoted to the store."""

    @property
    def held(self) -> int:
        """The messages that wait in files."""
        return sum(self.hours.values())


@dataclass(frozen=True, slots=True)
class Jobs:
    """The page `Jobs`."""

    schedules: Sequence[JobRow] | Unavailable
    """Bulk jobs of the store, the last one first."""
    dispatchers: Sequence[JobRow] | Unavailable
    migrations: Sequence[JobRow] | Unavailable
    cold_tier: Sequence[ColdDay] | Unavailable
    """The earliest first."""
    actions: Sequence[ActionRecord] | Unavailable
    """What people did, single actions and jobs, the last one first."""
    are_kept: bool | Unavailable = True
    """Whether a database keeps the actions."""

    @property
    def same_reason(self) -> Unavailable | None:
        """Why none of the pipeline's jobs can be shown, where it is the same for all; else None."""
        reasons = {
            part if isinstance(part, Unavailable) else None
            for part in (self.schedules, self.dispatchers, self.migrations, self.cold_tier)
        }
        return reasons.pop() if len(reasons) == 1 else None
