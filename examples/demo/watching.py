"""What people see while the demo runs: a table that moves, or a line for each thing that happens."""

from __future__ import annotations

import contextlib
from statistics import median
from typing import TYPE_CHECKING, Final

from examples.demo.lateness import span
from rich.live import Live
from rich.table import Table

from delayline.cli.screen import bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from examples.demo.play import Course

    from delayline.cli.screen import Screen


RECENT: Final = 1000
"""Messages whose lateness is shown while it runs: watching must not take the time of those that work."""


@contextlib.contextmanager
def watcher(screen: Screen) -> Iterator[Callable[[Course], None]]:
    """Give what to call with the course whenever it may have changed."""
    if not screen.animated:
        yield Milestones(screen)
        return
    with Live(console=screen.console, refresh_per_second=10) as live:
        yield lambda course: live.update(_table(course))


class Milestones:
    """Prints each thing once."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._told: set[str] = set()

    def __call__(self, course: Course) -> None:
        """Print what is new."""
        received = len(course.arrived)
        for name, happened, text in (
            ("sent", len(course.sent) == course.total, f"sent {course.total:,}"),
            ("killed", course.killed is not None, f"dispatcher killed with SIGKILL after {received:,} had arrived"),
            ("back", course.back is not None, "dispatcher restarted"),
            ("received", course.complete, f"received {received:,}"),
        ):
            if happened and name not in self._told:
                self._told.add(name)
                self._screen.echo(text)


def _table(course: Course) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    received, sent = len(course.arrived), len(course.sent)
    for name, count in (("sent", sent), ("waiting", max(0, sent - received)), ("received", received)):
        table.add_row(name, f"{count:,}", bar(count, course.total, 40))
    table.add_row("dispatcher", "", _dispatcher(course))
    recent = [one.lateness.total_seconds() * 1000 for one in course.arrivals[-RECENT:]]
    if recent:
        figures = f"p50 {span(round(median(recent), 1))}, max {span(round(max(recent), 1))}"
        table.add_row("lateness", "", f"{figures} of the last {len(recent):,}")
    return table


def _dispatcher(course: Course) -> str:
    if course.killed is None:
        return "running"
    return "killed with SIGKILL, restarting ..." if course.back is None else "killed with SIGKILL, restarted"
