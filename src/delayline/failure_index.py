"""An index of the failed messages of a queue: which failed in the same way, and when, read once and kept up to date.

A database cannot group failures itself: the place is in a stack trace that its JSON functions return as a text, and a
message with damaged headers would fail the whole statement. So each message's headers are read once. After that the
database counts its messages in stretches of numbers, and only stretches whose messages have changed are read again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import date, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from delayline.clock import from_microseconds, to_microseconds
from delayline.errors import ConfigurationError
from delayline.failure_groups import LONGEST_TYPE, Failure, failure_in, first_type, headers_of
from delayline.filters import MessageFilter
from delayline.message import Headers, from_wire_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from delayline.transport import NumberedQueue, Stretch

#: Numbers of a stretch.
WIDTH: Final = 2_500
#: Messages whose headers are read in a statement.
READ_AT_ONCE: Final = 1_000
#: Messages that are read, and characters of their failures that are kept, at most.
MOST_READ: Final = 5_000_000
MOST_CHARACTERS: Final = 50_000_000
UNKNOWN: Final = -1
"""Instead of a time of failure that no header has."""
EVERY_MESSAGE: Final = MessageFilter()


def check_for_groups(wanted: MessageFilter) -> None:
    """Raise ConfigurationError for conditions for which each message would be read."""
    wanted.check_of_failed()
    if wanted.asks_for_more_than_failure:
        raise ConfigurationError(
            "groups are of exception, type, destination and group: look for ids and headers in the list of messages"
        )


def time_of_failure(headers: Mapping[str, str]) -> datetime | None:
    """Return when a message with these headers failed; None if none says so."""
    try:
        return from_wire_time(headers[Headers.TIME_OF_FAILURE])
    except (KeyError, ValueError, OverflowError):
        return None


@dataclass(slots=True)
class FailureCount:
    """How many messages failed, and when."""

    count: int = 0
    new: int = 0
    """How many of them failed after a time that was asked for."""
    first: datetime | None = None
    last: datetime | None = None
    newest: int = 0
    """The highest number of a message."""
    by_day: Counter[date] = field(default_factory=Counter)

    def add(self, other: FailureCount, new: int) -> None:
        """Count more messages, of which so many are new."""
        self.count += other.count
        self.new += new
        self.first = min((time for time in (self.first, other.first) if time is not None), default=None)
        self.last = max((time for time in (self.last, other.last) if time is not None), default=None)
        self.newest = max(self.newest, other.newest)
        self.by_day.update(other.by_day)


@dataclass(slots=True)
class FailureGroup:
    """Messages that failed with the same exception at the same place."""

    key: str
    failure: Failure
    """Of one of them."""
    all: FailureCount = field(default_factory=FailureCount)
    kinds: dict[tuple[str, str], FailureCount] = field(default_factory=dict)
    """The same by the queue that they failed in, and their enclosed types."""

    @property
    def title(self) -> str:
        """The type of the exception, or why there is none."""
        kind = self.failure.exception[:LONGEST_TYPE]
        return kind or ("(headers that cannot be read)" if self.failure.damaged else "(unknown)")

    @property
    def largest_kinds(self) -> Sequence[tuple[str, str, FailureCount]]:
        """Queues and first types with their counts, the largest first."""
        kinds = [(queue, first_type(types), count) for (queue, types), count in self.kinds.items()]
        return sorted(kinds, key=lambda kind: (-kind[2].count, *kind[:2]))


class GroupOrder(StrEnum):
    """The orders of groups."""

    NEWEST = "newest"
    NEW = "new"
    LARGEST = "largest"
    NAME = "name"

    def sorted(self, groups: Iterable[FailureGroup]) -> list[FailureGroup]:
        """Return the groups in this order."""
        return sorted(groups, key=_SORTED_BY[self])


_SORTED_BY: Final[Mapping[GroupOrder, Callable[[FailureGroup], tuple[int | str, ...]]]] = {
    GroupOrder.NEWEST: lambda group: (-group.all.newest, group.key),
    GroupOrder.NEW: lambda group: (-group.all.new, -group.all.newest, group.key),
    GroupOrder.LARGEST: lambda group: (-group.all.count, group.key),
    GroupOrder.NAME: lambda group: (group.failure.exception.casefold(), group.failure.place, group.key),
}


class _IndexedStretch:
    """The messages of a stretch: number, kind of failure and time of failure of each, in the order of numbers."""

    __slots__ = ("counts", "kinds", "mark", "numbers", "times")

    def __init__(self, mark: Stretch, rows: Sequence[tuple[int, int, int]]) -> None:
        self.mark = mark
        self.numbers = array("q", [number for number, _, _ in rows])
        self.kinds = array("q", [kind for _, kind, _ in rows])
        self.times = array("q", [time for _, _, time in rows])
        self.counts: dict[int, FailureCount] = {}
        earliest: dict[int, int] = {}
        latest: dict[int, int] = {}
        days: dict[int, Counter[int]] = defaultdict(Counter)
        for number, kind, time in rows:
            count = self.counts.get(kind)
            if count is None:
                count = self.counts[kind] = FailureCount()
            count.count += 1
            count.newest = number
            if time != UNKNOWN:
                earliest[kind] = min(earliest.get(kind, time), time)
                latest[kind] = max(latest.get(kind, time), time)
                days[kind][time // DAY] += 1
        for kind, time in earliest.items():
            count = self.counts[kind]
            count.first, count.last = from_microseconds(time), from_microseconds(latest[kind])
            count.by_day = Counter({_day(day): number for day, number in days[kind].items()})

    def rows(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.numbers, self.kinds, self.times, strict=True)

    def new(self, since: datetime | None) -> Counter[int]:
        """Return how many messages of each kind have failed after that time."""
        new: Counter[int] = Counter()
        if since is None:
            return new
        after, parted = to_microseconds(since), set()
        for kind, count in self.counts.items():
            if count.first is None or count.last is None or count.last <= since:
                continue
            parted.add(kind)
        if parted:
            new.update(
                kind for kind, time in zip(self.kinds, self.times, strict=True) if time > after and kind in parted
            )
        return new


DAY: Final = 24 * 3600 * 1_000_000
_EPOCH: Final = date(1970, 1, 1).toordinal()


def _day(number: int) -> date:
    return date.fromordinal(_EPOCH + number)


class FailureIndex:
    """Groups the messages of an error queue, and finds those of a group. Belongs to an event loop.

    Args:
        queue: The error queue.
    """

    def __init__(self, queue: NumberedQueue) -> None:
        self.queue: NumberedQueue = queue
        self._stretches: dict[int, _IndexedStretch] = {}
        self._failures: list[Failure] = []
        self._kinds: dict[Failure, int] = {}
        self._characters = 0
        self.total: int = 0
        """How many messages the queue has."""
        self.read: int = 0
        """How many of them are in the index: the newest, where they are numbered."""

    async def refresh(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read what has changed, the newest messages first.

        Args:
            progress: Called after each stretch with `read` and `total`.
        """
        looked = await self.queue.look(WIDTH)
        if looked.renumbered or self._characters > MOST_CHARACTERS:
            self._forget()
        self.total = looked.total
        for gone in self._stretches.keys() - looked.stretches.keys():
            self._replace(gone, None)
        for place in sorted(looked.stretches, reverse=True):
            kept, mark = self._stretches.get(place), looked.stretches[place]
            if kept is not None and kept.mark == mark:
                continue
            room = MOST_READ - self.read + (0 if kept is None else len(kept.numbers))
            if mark.messages > room or self._characters > MOST_CHARACTERS:
                self._replace(place, None)
                continue
            self._replace(place, await self._read(place, mark, kept))
            if progress is not None:
                progress(self.read, self.total)

    def groups(self, wanted: MessageFilter = EVERY_MESSAGE, since: datetime | None = None) -> list[FailureGroup]:
        """Return the groups of the messages that fulfil the conditions on their failures, in no order.

        Args:
            wanted: Which messages; conditions on ids and headers are not checked.
            since: The time after which messages have to have failed to count as new.
        """
        fitting = self._fitting(wanted)
        groups: dict[str, FailureGroup] = {}
        for stretch in self._stretches.values():
            new = stretch.new(since)
            for kind in stretch.counts.keys() & fitting:
                failure, count = self._failures[kind], stretch.counts[kind]
                key = failure.key
                group = groups.get(key)
                if group is None:
                    group = groups[key] = FailureGroup(key, failure)
                group.all.add(count, new[kind])
                group.kinds.setdefault((failure.queue, failure.types), FailureCount()).add(count, new[kind])
        return list(groups.values())

    @property
    def latest(self) -> datetime | None:
        """When the last message failed; None if no message says when."""
        counts = (count for stretch in self._stretches.values() for count in stretch.counts.values())
        return max((count.last for count in counts if count.last is not None), default=None)

    def count(self, wanted: MessageFilter = EVERY_MESSAGE) -> int:
        """Return how many messages fulfil the conditions on their failures."""
        fitting = self._fitting(wanted)
        counts = (stretch.counts for stretch in self._stretches.values())
        return sum(counted[kind].count for counted in counts for kind in counted.keys() & fitting)

    def numbers(self, wanted: MessageFilter = EVERY_MESSAGE, before: int | None = None) -> Iterator[int]:
        """Yield the numbers of the messages that fulfil the conditions on their failures, the newest first.

        Args:
            wanted: Which messages; conditions on ids and headers are not checked.
            before: Only numbers below.
        """
        fitting = self._fitting(wanted)
        for place, stretch in sorted(self._stretches.items(), key=lambda item: -item[0]):
            if not stretch.counts.keys() & fitting or (before is not None and place * WIDTH >= before):
                continue
            end = len(stretch.numbers) if before is None else bisect_left(stretch.numbers, before)
            for position in range(end - 1, -1, -1):
                if stretch.kinds[position] in fitting:
                    yield stretch.numbers[position]

    async def _read(self, place: int, mark: Stretch, kept: _IndexedStretch | None) -> _IndexedStretch:
        """Read a stretch: the headers of those messages only that are not known."""
        first, last = place * WIDTH, (place + 1) * WIDTH - 1
        numbers = await self.queue.numbers(first, last)
        known = {} if kept is None else {number: (number, kind, time) for number, kind, time in kept.rows()}
        unknown = [number for number in numbers if number not in known]
        while unknown:
            page = await self.queue.read(unknown[0], unknown[-1], READ_AT_ONCE)
            for number, message in page:
                if number not in known:
                    headers, damaged = headers_of(message)
                    known[number] = (number, self._kind_of(failure_in(headers, damaged)), _failed_at(headers))
            end = page[-1][0] if len(page) == READ_AT_ONCE else unknown[-1]
            unknown = unknown[bisect_left(unknown, end + 1) :]
        return _IndexedStretch(mark, [known[number] for number in numbers if number in known])

    def _kind_of(self, failure: Failure) -> int:
        kind = self._kinds.get(failure)
        if kind is None:
            kind = self._kinds[failure] = len(self._failures)
            self._failures.append(failure)
            self._characters += 500 + sum(len(text) for text in failure[:4])
        return kind

    def _fitting(self, wanted: MessageFilter) -> set[int]:
        """Return the kinds of failures that fulfil the conditions."""
        return {kind for kind, failure in enumerate(self._failures) if wanted.fits_failure(failure)}

    def _replace(self, place: int, stretch: _IndexedStretch | None) -> None:
        before = self._stretches.pop(place, None)
        self.read -= 0 if before is None else len(before.numbers)
        if stretch is not None:
            self._stretches[place] = stretch
            self.read += len(stretch.numbers)

    def _forget(self) -> None:
        self._stretches, self._failures, self._kinds = {}, [], {}
        self._characters = self.read = 0


def _failed_at(headers: Mapping[str, str]) -> int:
    time = time_of_failure(headers)
    return UNKNOWN if time is None else to_microseconds(time)
