from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import Result, delayline_process

if TYPE_CHECKING:
    from collections.abc import Callable

REMINDERS = Path(__file__).parents[2] / "examples/reminders"


def test_reminders_by_hand(
    run: Callable[..., Result],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: list[subprocess.Popen[str]],
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", f"sqlite:///{folder / 'reminders.db'}")
    assert run("setup", "--endpoint", "reminders", "--queue", "customers").code == 0
    few = folder / "few.csv"
    few.write_text("id,destination,body,delay_ms\na,customers,first,1\nb,customers,second,900\n")
    monkeypatch.chdir(REMINDERS)
    processes += [delayline_process("run", f"endpoints:{name}") for name in ("customers", "dispatcher")]
    customers = processes[0]
    assert customers.stdout is not None
    assert customers.stdout.readline().startswith("customers runs: ")
    assert run("send", "--from", str(few), "--endpoint", "reminders").code == 0
    assert [customers.stdout.readline().split(" (")[0] for _ in range(2)] == ["a: first", "b: second"]


def test_the_typed_service(folder: Path) -> None:
    """Given the example with five kinds of message, when it runs, then its README is true."""
    example = Path(__file__).parents[2] / "examples/typed_service"
    ran = subprocess.run(
        [sys.executable, str(example / "typed_service.py")],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        check=True,
    )
    assert ran.stdout in (example / "README.md").read_text()


def test_the_generator_writes_the_shipped_rows(folder: Path) -> None:
    made = folder / "reminders.csv"
    command = [sys.executable, "-m", "examples.reminders.generate", "--to", str(made)]
    subprocess.run(command, check=True, capture_output=True, cwd=REMINDERS.parents[1])
    assert made.read_bytes() == (REMINDERS / "reminders.csv").read_bytes()
