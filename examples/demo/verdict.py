"""What the demo found: nothing lost, nothing doubled, nothing early, and how late."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from examples.demo.lateness import Lateness, as_text, histogram, lateness_of, span

if TYPE_CHECKING:
    from examples.demo.play import Course

    from delayline.cli.screen import Screen


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of one run."""

    sent: int
    not_sent: int
    received: int
    lost: int
    duplicated: int
    early: int
    still_stored: int
    in_error_queue: int
    seconds: float
    outage_seconds: float
    lateness: Lateness
    lateness_without_outage: Lateness
    outside: list[float]
    touched: list[float]

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        broken = (self.not_sent, self.lost, self.duplicated, self.early, self.still_stored, self.in_error_queue)
        return not any(broken) and self.sent > 0

    def document(self) -> dict[str, object]:
        """Return the figures for machines."""
        figures = asdict(self)
        outside, touched = figures.pop("outside"), figures.pop("touched")
        bars = [{"lateness": label, "messages": count} for label, count in histogram([*outside, *touched])]
        return {"kept": self.kept, **figures, "histogram": bars}


def verdict_of(course: Course) -> Verdict:
    """Return the figures of a course that has ended."""
    waited = course.touched_by_outage()
    outside: list[float] = []
    touched: list[float] = []
    for one in course.arrivals:
        (touched if waited(one) else outside).append(one.lateness.total_seconds() * 1000)
    end = course.finished or course.started
    outage = course.back - course.killed if course.killed and course.back else end - end
    return Verdict(
        sent=len(course.sent),
        not_sent=course.total - len(course.sent),
        received=len(course.arrived),
        lost=len(course.sent - course.arrived.keys()),
        duplicated=sum(count - 1 for count in course.arrived.values()),
        early=sum(milliseconds < 0 for milliseconds in (*outside, *touched)),
        still_stored=course.still_stored,
        in_error_queue=course.in_error_queue,
        seconds=round((end - course.started).total_seconds(), 1),
        outage_seconds=round(outage.total_seconds(), 2),
        lateness=lateness_of([*outside, *touched]),
        lateness_without_outage=lateness_of(outside),
        outside=outside,
        touched=touched,
    )


def show(screen: Screen, verdict: Verdict) -> None:
    """Print the figures for people."""
    zeros = [(name, getattr(verdict, name)) for name in ("lost", "duplicated", "early")]
    rows: list[tuple[str, object]] = [("sent", f"{verdict.sent:,}"), ("received", f"{verdict.received:,}"), *zeros]
    unwanted = ((name, getattr(verdict, name)) for name in ("not_sent", "still_stored", "in_error_queue"))
    rows += [(name.replace("_", " "), count) for name, count in unwanted if count]
    screen.table(("", "messages"), rows)
    screen.echo("")
    whole, outside = verdict.lateness, verdict.lateness_without_outage
    screen.table(
        ("lateness", "messages", "p50", "p99", "max"),
        [
            (label, f"{one.messages:,}", span(one.p50_ms), span(one.p99_ms), span(one.max_ms))
            for label, one in (
                (f"all, with {verdict.outage_seconds:g} s without a dispatcher", whole),
                ("outside that outage and the backlog it left", outside),
            )
        ],
    )
    screen.echo("\nlateness of all")
    for line in as_text(histogram([*verdict.outside, *verdict.touched])):
        screen.echo(line)
