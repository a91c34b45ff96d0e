"""A line for each endpoint, the worst first: what an on-call person reads before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from delayline.dashboard.model import Now, Unavailable
from delayline.dashboard.rendering import number
from delayline.readable import duration, local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from delayline.dashboard.model import DueCounts
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.store import DueBucket

#: A message that is overdue for longer means that no poller dispatches it.
LATE: Final = timedelta(seconds=10)
#: Pauses that a line names.
PAUSES_NAMED: Final = 3
#: The kinds of a state, the worst first.
KINDS: Final = ("bad", "warn", "", "good")


@dataclass(frozen=True, slots=True)
class EndpointLine:
    """What is so with an endpoint, in a line; None for what is not known."""

    name: str
    kind: str
    """`bad`, `warn`, `good`, or empty where nothing is known to be wrong and something is not known."""
    state: str
    """The reasons, the worst first, in words."""
    overdue: DueBucket | None
    oldest: timedelta | None
    """How long the oldest message is overdue."""
    errors: int | None
    receivers: int | None
    """Receivers of processes that are alive."""
    lateness: float | None
    rate: float | None


def lines(states: Sequence[tuple[str, Now | Unavailable]]) -> list[EndpointLine]:
    """Return the line of each endpoint by name, the worst first."""
    each = [_line(name, now) for name, now in states]
    return sorted(each, key=lambda line: (KINDS.index(line.kind), -(line.oldest or timedelta(0)), line.name))


def _line(name: str, now: Now | Unavailable) -> EndpointLine:
    if isinstance(now, Unavailable):
        return EndpointLine(name, "bad", "not available", None, None, None, None, None, None)
    found = sorted(_reasons(now), key=lambda reason: KINDS.index(reason[0])) or [("good", "well")]
    due = None if isinstance(now.due, Unavailable) else now.due
    overdue_since = None if due is None or not due.overdue.count else due.earliest
    rates = None if isinstance(now.throughput, Unavailable) else now.throughput
    receivers = None
    if not isinstance(now.processes, Unavailable):
        receivers = sum(len(process.row.receivers) for process in now.processes if process.alive)
    return EndpointLine(
        name,
        found[0][0],
        "; ".join(text for _, text in found),
        None if due is None else due.overdue,
        None if overdue_since is None or overdue_since >= now.at else now.at - overdue_since,
        None if isinstance(now.errors, Unavailable) else now.errors,
        receivers,
        None if rates is None else rates.lateness_p99,
        None if rates is None else rates.dispatched_a_second,
    )


def _reasons(now: Now) -> Iterator[tuple[str, str]]:
    """Yield what is wrong or not known: a kind and a text each."""
    yield from _of_processes(now)
    if isinstance(now.levels, Unavailable):
        yield "bad" if now.levels.temporary else "", "delay levels are not known"
    elif isinstance(now.due, Unavailable) and now.levels is None:
        yield "bad" if now.due.temporary else "", "due messages are not known"
    if (
        not isinstance(now.due, Unavailable)
        and now.due.overdue.count
        and now.due.earliest
        and now.at - now.due.earliest > LATE
    ):
        yield "bad", f"overdue for {duration(now.at - now.due.earliest)}"
    if not isinstance(now.due, Unavailable) and now.due.pauses:
        yield "warn", _paused(now.due, now.due.pauses)
    if isinstance(now.errors, Unavailable):
        yield "bad" if now.errors.temporary else "", "errors are not known"
    elif now.errors:
        yield "warn", f"{now.errors:,} in the error queue"
    if not isinstance(now.queues, Unavailable):
        paused = [queue.name for queue in now.queues if queue.limits.paused]
        if paused:
            yield "warn", f"paused: {', '.join(paused)}"


def _paused(due: DueCounts, pauses: Sequence[DispatchPause]) -> str:
    """Return what is not dispatched, and how much of it waits."""
    named, others = pauses[:PAUSES_NAMED], len(pauses) - PAUSES_NAMED
    what = ", ".join(pause.text for pause in named) + (f" and {others:,} more" if others > 0 else "")
    waiting = number(due.paused.count, about=not due.paused.exact)
    return f"paused: {what}" + (f" ({waiting} overdue)" if due.paused.count else "")


def _of_processes(now: Now) -> Iterator[tuple[str, str]]:
    if isinstance(now.processes, Unavailable):
        yield "bad" if now.processes.temporary else "", "processes are not known"
        return
    if now.processes and not any(process.alive for process in now.processes):
        last: datetime = max(process.row.written for process in now.processes)
        yield "bad", f"silent since {local(last)}"
    broken = {
        name for process in now.processes if process.alive for name, state in process.row.breakers.items() if state > 1
    }
    if broken:
        yield "bad", f"breaker triggered: {', '.join(sorted(broken))}"
