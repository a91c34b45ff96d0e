"""What an endpoint does now, when its messages are due, and how late they were."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

from delayline import error_queue
from delayline.clock import EPOCH, ONE_DAY, ONE_HOUR, ONE_MINUTE
from delayline.dashboard.back_ends import PageQueries, refuse_memory, unavailable, within_limit
from delayline.dashboard.live import Shared
from delayline.dashboard.minutes import MINUTE_ROWS, NO_HISTORY, MinuteSums, rows_of
from delayline.dashboard.model import (
    DueCounts,
    Forecast,
    ForecastBar,
    Lateness,
    Now,
    ProcessState,
    QueueState,
    Rates,
    Throughput,
    Unavailable,
)
from delayline.dashboard.search import GROWING, forecasting
from delayline.doctor import check_urls, examine_endpoint
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DelaylineError
from delayline.readable import local
from delayline.telemetry.measurements import LATENESS_BOUNDS, Histogram
from delayline.telemetry.pending import BUCKETS, due_apart, pauses_of
from delayline.transport import QueueLimits, SupportsQueueLimits, SupportsQueueLookup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delayline.dashboard.back_ends import BackEnds
    from delayline.dashboard.levels import DelayLevels
    from delayline.delayed.store import DueBucket, DueForecast
    from delayline.doctor import Finding
    from delayline.telemetry.history import MinuteRow

#: The spans for which delay levels are counted on `Now`.
NOW_WITHIN: Final = (ONE_MINUTE, ONE_HOUR, ONE_DAY)
HALF_AN_HOUR: Final = timedelta(minutes=30)
#: A process whose last row is older has ended, or cannot write.
ALIVE: Final = timedelta(minutes=3)
#: The minutes that rates are taken of.
RATES_OF: Final = timedelta(minutes=5)
#: The last minutes of a chart, which are drawn again: the processes write their rows one after the other.
RATES_REDRAWN: Final = 10
MINUTES_A_DAY: Final = ONE_DAY // ONE_MINUTE
#: Seconds for which the rows of a day are used again: they are many, and a new one comes each minute.
DAY_KEPT: Final = 30.0
#: Destinations that a forecast shows by name.
NAMED_DESTINATIONS: Final = 10
OTHERS: Final = "(other)"
LONGEST_QUEUES: Final = 200
#: Where the bars of a forecast end, from now, by the name of the zoom.
SPANS: Final[Mapping[str, Sequence[timedelta]]] = {
    "all": GROWING,
    "hour": [count * timedelta(minutes=1) for count in range(1, 61)],
    "day": [count * timedelta(minutes=30) for count in range(1, 49)],
    "week": [count * timedelta(hours=4) for count in range(1, 43)],
    "month": [count * timedelta(days=1) for count in range(1, 32)],
    "year": [count * timedelta(days=7) for count in range(1, 54)],
}
#: Time spans of the heat map, the width of a column, and whether hours' rows are enough.
LATENESS_SPANS: Final[Mapping[str, tuple[timedelta, timedelta]]] = {
    "hour": (timedelta(hours=1), timedelta(minutes=1)),
    "6 hours": (timedelta(hours=6), timedelta(minutes=6)),
    "day": (timedelta(days=1), timedelta(minutes=30)),
    "week": (timedelta(days=7), timedelta(hours=3)),
    "month": (timedelta(days=30), timedelta(hours=12)),
}
NO_BACKLOG: Final = "no backlog was dispatched in the last day, so what the endpoint can dispatch is not known"
#: A backlog was dispatched in a minute with so many messages at least, if most of them were late by more than this.
BACKLOG_A_MINUTE: Final = 500
LATE_IN_BACKLOG: Final = 1.0
#: How far back the last row of a silent endpoint is looked for: in minutes' rows, then in hours' rows.
SILENT_WITHIN: Final = (timedelta(days=1), timedelta(days=60))


class Overview(PageQueries):
    """The pages of an endpoint as a whole: now, forecast, lateness and the doctor's findings."""

    def __init__(self, back_ends: BackEnds, levels: DelayLevels) -> None:
        super().__init__(back_ends)
        self._levels = levels
        self._sums = MinuteSums(back_ends)
        self._day = Shared(self._rows_of_day, DAY_KEPT, back_ends.clock)

    async def now(self) -> Now:
        """Return the page `Now`."""
        due, recent, queues, errors, levels = await asyncio.gather(
            self._due_counts(), self._recent(), self._queues(), self._error_count(), self._levels.forecast(*NOW_WITHIN)
        )
        if isinstance(recent, Unavailable):
            return Now(self.back_ends.clock.now(), due, recent, recent, recent, queues, errors, levels)
        at, rows = recent
        rates = rates_of(rows, at, RATES_REDRAWN)
        return Now(
            self.back_ends.clock.now(), due, _throughput(at, rows), rates, _processes(at, rows), queues, errors, levels
        )

    @within_limit
    async def rates(self) -> Rates:
        """Return what all processes did in each minute of the last day."""
        return rates_of(await self._day(), await self.back_ends.time(), MINUTES_A_DAY)

    async def forecast(self, span: str = "day") -> Forecast | Unavailable:
        """Return the due times of pending messages.

        Args:
            span: The zoom: `hour`, `day`, `week`, `month`, `year` or `all`.

        Raises:
            ConfigurationError: There is no such zoom.
        """
        _check_span(span, SPANS)
        rate, forecasts = await asyncio.gather(self._drain_rate(), self._forecast(span))
        if isinstance(forecasts, Unavailable):
            return forecasts
        at, both, cold = forecasts
        bars = [
            _bar(bucket, files, rate if isinstance(rate, float) else None)
            for bucket, files in zip(both.buckets, cold.buckets if cold else [None] * len(both.buckets), strict=True)
        ]
        totals: Counter[str] = Counter()
        for bar in bars:
            totals.update(bar.destinations)
        return Forecast(at, span, bars, rate, [name for name, _ in totals.most_common()])

    @within_limit
    async def lateness(self, span: str = "day", *, destination: str | None = None) -> Lateness:
        """Return the heat map of lateness.

        Args:
            span: How far back: `hour`, `6 hours`, `day`, `week` or `month`.
            destination: Only messages to this queue; all by default.
        """
        _check_span(span, LATENESS_SPANS)
        length, step = LATENESS_SPANS[span]
        self.back_ends.sql_store(MINUTE_ROWS)
        now = await self.back_ends.time()
        end = EPOCH + -(-(now - EPOCH) // step) * step
        start = end - -(-length // step) * step
        hour = EPOCH + (now - EPOCH) // ONE_HOUR * ONE_HOUR
        rows = await self._sums.between(max(start, hour) if step >= ONE_HOUR else start, end)
        if step >= ONE_HOUR:
            rows += await self._sums.between(start, hour, scale=60)
        columns = (end - start) // step
        counts = [[0] * (len(LATENESS_BOUNDS) + 1) for _ in range(columns)]
        names: set[str] = set()
        uncounted = 0
        for row in rows:
            names.update(row.lateness)
            uncounted += row.uncounted
            column = counts[min((row.start - start) // step, columns - 1)]
            for name, buckets in row.lateness.items():
                if destination in (None, name):
                    for position, count in enumerate(buckets):
                        column[position] += count
        histograms = [Histogram(LATENESS_BOUNDS, column, 0.0) for column in counts]
        return Lateness(
            start=start,
            step=step,
            bounds=LATENESS_BOUNDS,
            counts=counts,
            destination=destination,
            destinations=sorted(names),
            p50=[histogram.quantile(0.5) for histogram in histograms],
            p99=[histogram.quantile(0.99) for histogram in histograms],
            uncounted=uncounted,
        )

    @within_limit
    async def doctor(self) -> list[Finding]:
        """Return what `delayline doctor` finds."""
        settings = self.back_ends.settings
        if settings is None:
            raise ConfigurationError("the doctor needs settings: give the dashboard the settings of this endpoint")
        refuse_memory(settings.resolved_store_url)
        refuse_memory(settings.resolved_transport_url)
        check_urls(settings)
        return await examine_endpoint(settings)

    @within_limit
    async def _due_counts(self) -> DueCounts:
        store, now = await forecasting(self.back_ends), await self.back_ends.time()
        try:
            pauses = await pauses_of(store)
        except BackendUnusable:  # the user may not read them
            pauses = None
        due = await due_apart(store, now, pauses or ())
        overdue, paused, minute, hour, day, later = (due.buckets[name] for name in BUCKETS)
        return DueCounts(overdue, paused, minute, hour, day, later, due.earliest, pauses)

    async def _rows_of_day(self) -> list[MinuteRow]:
        self.back_ends.sql_store(MINUTE_ROWS)
        now = await self.back_ends.time()
        return await self._sums.between(now - ONE_DAY, now + ONE_MINUTE)

    @within_limit
    async def _recent(self) -> tuple[datetime, list[MinuteRow]]:
        self.back_ends.sql_store(MINUTE_ROWS)  # says so where there can be no rows, before a store is opened
        now = await self.back_ends.time()
        rows = await rows_of(self.back_ends, now - HALF_AN_HOUR, now + ONE_MINUTE)
        for scale, span in zip((1, 60), SILENT_WITHIN, strict=True):
            rows = rows or await rows_of(self.back_ends, now - span, now + ONE_MINUTE, scale=scale)
        return now, rows

    @within_limit
    async def _drain_rate(self) -> float:
        """Return the messages a second that all processes have dispatched at most for two minutes of a backlog."""
        rows = await self._day()
        best = highest_drain(rows)
        if not best:
            raise ConfigurationError(NO_BACKLOG if rows else NO_HISTORY)
        return best

    @within_limit
    async def _queues(self) -> list[QueueState]:
        transport = await self.back_ends.transport()
        queues = error_queue.managed_queues(transport)
        names = [self.back_ends.name, self.back_ends.error_queue]
        limits = {}
        if isinstance(transport, SupportsQueueLimits):
            limits = {limit.queue: limit for limit in await transport.limits()}
            names += limits
        elif isinstance(transport, SupportsQueueLookup):
            names += await transport.queues()
        states = []
        for name in list(dict.fromkeys(names))[:LONGEST_QUEUES]:
            try:
                number: int | Unavailable = await queues.count(name)
            except BackendUnavailable:
                raise
            except DelaylineError as error:
                number = unavailable(error)
            states.append(QueueState(name, number, limits.get(name) or QueueLimits(name)))
        return states

    @within_limit
    async def _error_count(self) -> int:
        return await (await self.back_ends.queues()).count(self.back_ends.error_queue)

    @within_limit
    async def _forecast(self, span: str) -> tuple[datetime, DueForecast, DueForecast | None]:
        store, now = await forecasting(self.back_ends), await self.back_ends.time()
        latest = datetime.max.replace(tzinfo=UTC) - ONE_DAY
        edges = [now, *(now + end for end in SPANS[span] if now + end < latest)]
        cold = None
        if hasattr(store, "cold_forecast"):
            cold = cast("DueForecast", await store.cold_forecast(edges, by_destination=True))
        return now, await store.due_forecast(edges, by_destination=True), cold


def _throughput(now: datetime, rows: Sequence[MinuteRow]) -> Throughput | Unavailable:
    """Return the rates of the last minutes."""
    if not rows:
        return Unavailable(NO_HISTORY)
    last = max(row.written for row in rows)
    rows = [row for row in rows if row.start > now - RATES_OF - 2 * ONE_MINUTE]
    if not rows:
        return Unavailable(f"silent since {local(last)}: no process of this endpoint has written a minute row since")
    since = min(row.start for row in rows)
    seconds = max(60.0, (max(row.start for row in rows) + ONE_MINUTE - since).total_seconds())
    buckets = [0] * (len(LATENESS_BOUNDS) + 1)
    for row in rows:
        for counts in row.lateness.values():
            buckets = [total + count for total, count in zip(buckets, counts, strict=True)]
    late = Histogram(LATENESS_BOUNDS, buckets, 0.0)
    return Throughput(
        since,
        sum(row.handled for row in rows) / seconds,
        sum(row.failed for row in rows) / seconds,
        sum(row.dispatched for row in rows) / seconds,
        late.quantile(0.5),
        late.quantile(0.99),
    )


def rates_of(rows: Sequence[MinuteRow], now: datetime, minutes: int) -> Rates:
    """Return what all processes did in each of so many minutes, up to the present one."""
    start = EPOCH + (now - EPOCH) // ONE_MINUTE * ONE_MINUTE - (minutes - 1) * ONE_MINUTE
    sums: dict[int, Counter[str]] = {}
    for row in rows:
        if row.minutes == 1:  # those of an hour say nothing of its minutes
            minute = sums.setdefault((row.start - start) // ONE_MINUTE, Counter())
            minute.update(dispatched=row.dispatched, handled=row.handled, failed=row.failed)

    def column(name: str) -> list[int | None]:
        return [sums[place][name] if place in sums else None for place in range(minutes)]

    return Rates(start, column("dispatched"), column("handled"), column("failed"))


def highest_drain(rows: Sequence[MinuteRow]) -> float | None:
    """Return the most messages a second that left in each of two successive minutes of a backlog; None for no backlog.

    Traffic that leaves in time says nothing of what could be dispatched.
    """
    dispatched: Counter[datetime] = Counter()
    late: Counter[datetime] = Counter()
    known: Counter[datetime] = Counter()
    first = bisect_right(LATENESS_BOUNDS, LATE_IN_BACKLOG)
    for row in rows:
        dispatched[row.start] += row.dispatched
        for counts in row.lateness.values():
            late[row.start] += sum(counts[first:])
            known[row.start] += sum(counts)
    drained = {
        minute: number
        for minute, number in dispatched.items()
        if number >= BACKLOG_A_MINUTE and 2 * late[minute] > known[minute]
    }
    pairs = (min(number, drained.get(minute + ONE_MINUTE, 0)) for minute, number in drained.items())
    return max(pairs, default=0) / 60 or None


def _processes(now: datetime, rows: Sequence[MinuteRow]) -> list[ProcessState] | Unavailable:
    """Return the processes by their last rows."""
    if not rows:
        return Unavailable(NO_HISTORY)
    last = {row.process: row for row in rows}
    return [ProcessState(row, now - row.written < ALIVE) for row in sorted(last.values(), key=lambda row: row.process)]


def _bar(bucket: DueBucket, files: DueBucket | None, rate: float | None) -> ForecastBar:
    cold = 0 if files is None else files.count
    shares = Counter(bucket.destinations) - Counter({} if files is None else files.destinations)
    named = dict(shares.most_common(NAMED_DESTINATIONS))
    rest = shares.total() - sum(named.values())
    if rest:
        named[OTHERS] = rest
    capacity = None
    if rate is not None and bucket.start is not None and bucket.end is not None:
        capacity = rate * (bucket.end - bucket.start).total_seconds()
    return ForecastBar(
        start=bucket.start,
        end=bucket.end,
        hot=bucket.count - cold,
        cold=cold,
        exact=bucket.exact,
        at_least=bucket.at_least,
        destinations=named,
        capacity=capacity,
        exceeds=capacity is not None and bucket.count > capacity,
    )


def _check_span(span: str, known: Mapping[str, object]) -> None:
    if span not in known:
        raise ConfigurationError(f"span={span!r} is unknown: use one of {', '.join(known)}")
