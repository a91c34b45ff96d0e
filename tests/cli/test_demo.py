from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from examples.demo import demo, lateness, reminders
from examples.demo.play import Arrival, Course
from examples.demo.reminders import DESTINATION
from examples.demo.verdict import verdict_of
from tests.cli.conftest import Result, put
from tests.eventually import eventually

from delayline.clock import from_microseconds
from delayline.message import Headers, Message, to_wire_time

if TYPE_CHECKING:
    from collections.abc import Iterator

START = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples/reminders/reminders.csv"


def demo_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def arrival(message_id: str, due: float, late: float = 0.01) -> Arrival:
    at = START + timedelta(seconds=due)
    return Arrival(message_id, at, at + timedelta(seconds=late))


def course(*arrivals: Arrival, sent: int | None = None) -> Course:
    ids = {one.id for one in arrivals}
    return Course(
        total=sent or len(ids),
        started=START,
        sent=ids | {f"unseen {number}" for number in range((sent or 0) - len(ids))},
        arrivals=list(arrivals),
        arrived=Counter(one.id for one in arrivals),
        finished=START + timedelta(seconds=30),
    )


@pytest.mark.slow
def test_a_short_demo_keeps_every_promise(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    arguments = ("--rows", "300", "--within", "3", "--outage", "0.2", "--dir", "runs", "--json")
    process = demo_process(*arguments)
    processes.append(process)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    document = Result(0, out, err).document
    assert document["kept"]
    assert (document["sent"], document["received"]) == (300, 300)
    assert (document["lost"], document["duplicated"], document["early"]) == (0, 0, 0)
    assert document["outage_seconds"] > 0.2
    assert sum(one["messages"] for one in document["histogram"]) == 300
    run = Path(document["directory"])
    assert run.parent == folder / "runs"
    journal = (run / "receiver.journal").read_text().splitlines()
    assert len([line for line in journal if line.startswith("reminder-")]) == 300
    assert document["plot"] is None or Path(document["plot"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_demo_in_which_a_message_is_doubled_is_reported(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    # Given a demo under way
    process = demo_process("--rows", "50", "--within", "3", "--outage", "0.2", "--dir", "runs", "--json")
    processes.append(process)
    eventually(lambda: any(arrivals_in(folder)))
    # When a message that has arrived is put into the queue again
    (journal,) = folder.glob("runs/*/receiver.journal")
    message_id, due, _ = next(arrivals_in(folder))
    copy = Message(message_id, {Headers.DELIVER_AT: to_wire_time(from_microseconds(int(due)))}, b"")
    put(DESTINATION, [copy], url=f"sqlite:///{journal.with_name('demo.db')}")
    out, err = process.communicate(timeout=100)
    # Then the demo has failed
    assert process.returncode == 1, err
    document = Result(1, out, err).document
    assert (document["kept"], document["lost"], document["duplicated"], document["early"]) == (False, 0, 1, 0)


def arrivals_in(folder: Path) -> Iterator[list[str]]:
    for journal in folder.glob("runs/*/receiver.journal"):
        for line in journal.read_text().splitlines():
            if line.startswith("reminder-"):
                yield line.split()


def test_each_broken_promise_is_counted() -> None:
    verdict = verdict_of(course(arrival("a", 1), arrival("a", 1), arrival("b", 1, -0.001), sent=3))
    assert (verdict.lost, verdict.duplicated, verdict.early, verdict.kept) == (1, 1, 1, False)
    good = course(arrival("a", 1))
    assert verdict_of(good).kept
    assert not verdict_of(replace(good, still_stored=1)).kept
    assert not verdict_of(replace(good, in_error_queue=1)).kept
    assert not verdict_of(replace(good, total=2)).kept
    assert not verdict_of(course()).kept


def test_the_outage_ends_when_messages_are_on_time_again() -> None:
    arrivals = (
        arrival("before", 1),
        arrival("due in the outage", 6, 3.5),
        arrival("behind the backlog", 9.3, 0.5),
        arrival("on time again", 10),
        arrival("late without excuse", 12, 2),
    )
    happened = course(*arrivals)
    happened.killed, happened.back = START + timedelta(seconds=5), START + timedelta(seconds=9)
    verdict = verdict_of(happened)
    assert verdict.outage_seconds == 4
    assert sorted(verdict.touched) == [500, 3500]
    assert verdict.lateness_without_outage == lateness.Lateness(3, 10, 2000, 2000)
    assert verdict.lateness.max_ms == 3500


def test_an_outage_that_never_ends_touches_everything_after_it() -> None:
    happened = course(arrival("before", 1), arrival("after", 8, 20))
    happened.killed = START + timedelta(seconds=5)
    assert verdict_of(happened).touched == [20_000]


def test_percentiles_are_nearest_ranks() -> None:
    assert lateness.lateness_of([float(number) for number in range(100, 0, -1)]) == lateness.Lateness(100, 50, 99, 100)
    assert lateness.lateness_of([7]) == lateness.Lateness(1, 7, 7, 7)
    assert lateness.lateness_of([]) == lateness.Lateness(0, 0, 0, 0)


def test_the_histogram_lines_up() -> None:
    bars = lateness.histogram([1, 1, 1, 1, 30, 6000])
    assert bars[0] == ("< 5 ms", 4)
    assert bars[-1] == ("> 5 s", 1)
    assert sum(count for _, count in bars) == 6
    lines = lateness.as_text(bars)
    assert len({line.index("  ", line.index("s")) for line in lines}) == 1  # where the labels end
    assert lines[0].endswith("      4  " + "█" * 40)
    assert lateness.as_text(lateness.histogram([])) == []


def test_without_matplotlib_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        lateness.draw([1.0], [], folder / "x.png")


def test_the_picture_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    lateness.draw([1.0, 2.0], [900.0], folder / "x.png")
    lateness.draw([], [], folder / "empty.png")
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_shipped_rows_equal_the_generated_ones() -> None:
    shipped = reminders.read(SHIPPED)
    assert shipped == reminders.generate()
    assert len(shipped) == len({one.id for one in shipped}) == 10_000
    assert min(one.delay_ms for one in shipped) >= 3_000
    assert max(one.delay_ms for one in shipped) <= 15_000


def test_delays_can_be_shortened() -> None:
    assert max(one.delay_ms for one in reminders.within(reminders.generate(50), 2)) == 2000


@pytest.mark.parametrize("content", ["", "id,body\na,b\n", "id,destination,body,delay_ms\na,b,c,soon\n"])
def test_a_file_without_reminders_is_refused(folder: Path, content: str) -> None:
    (folder / "r.csv").write_text(content)
    ran = CliRunner().invoke(demo, ["--from", "r.csv"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "r.csv holds no reminders" in ran.stderr
