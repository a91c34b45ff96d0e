"""A machine whose clock is ten minutes off: messages come when they are due, and `doctor` says how far off it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.conftest import not_installed
from tests.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF: Final = timedelta(minutes=10)
MINUTE: Final = timedelta(minutes=1)


@pytest.fixture(scope="session")
def library() -> Path:
    """Provide the library that gives a process another clock."""
    found = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), *Path("/usr/lib").glob("faketime/libfaketime.so.1")]
    return found[0] if found else not_installed("libfaketime", "apt-get install faketime")


class Machine:
    """A machine with delayline, whose clock is off; what it measures with its monotonic clock is right."""

    def __init__(self, library: Path, off: timedelta, *place: str) -> None:
        clock = {"FAKETIME": f"{off.total_seconds():+.0f}", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        self._environment = {**os.environ, "LD_PRELOAD": str(library), **clock}
        self._place = ["--endpoint", "sales", *place]

    def delayline(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self._command(*words), env=self._environment, capture_output=True, text=True, timeout=300, check=False
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the endpoint, which dispatches what is due."""
        process = subprocess.Popen(self._command("run"), env=self._environment, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait(120)

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "delayline", *words, *self._place]


def due_times(machine: Machine) -> dict[str, datetime]:
    found = json.loads(machine.delayline("pending", "--json").stdout)["pending"]
    return {message["id"]: datetime.fromisoformat(message["due"]) for message in found}


@pytest.mark.parametrize("off", [OFF, -OFF], ids=["fast", "slow"])
@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
@pytest.mark.sample(1)
def test_what_a_server_holds_comes_by_the_servers_clock(
    request: pytest.FixtureRequest, library: Path, product: str, off: timedelta
) -> None:
    # Given a machine whose clock is off, and the database on another
    machine = Machine(library, off, "--url", request.getfixturevalue(f"{product}_url"))
    assert machine.delayline("setup", "--queue", "billing").returncode == 0
    # When it sends messages with a delay
    before = datetime.now(UTC)
    for message_id, delay in (("soon", "1s"), ("later", "5m")):
        assert machine.delayline("send", "billing", "hello", "--delay", delay, "--id", message_id).returncode == 0
    # Then they are due by the right clock, whatever its own says
    assert before + timedelta(minutes=5) <= due_times(machine)["later"] <= datetime.now(UTC) + timedelta(minutes=5)
    # And it dispatches those that are due by that clock, and no other
    with machine.running():
        eventually(lambda: "soon" not in due_times(machine))
    if datetime.now(UTC) < before + timedelta(minutes=5):  # a machine that is slow enough has seen its due time
        assert list(due_times(machine)) == ["later"]
    # And doctor says how far the machine is off
    checked = machine.delayline("doctor")
    sign = "+" if off > timedelta() else "-"
    assert checked.returncode == 1
    assert f"this machine is {sign}" in checked.stdout and "the server's clock decides" in checked.stdout


def test_messages_that_are_shifted_come_on_time_from_a_file_whose_machine_is_fast(
    library: Path, tmp_path: Path
) -> None:
    # Given a message that is due in some seconds, in a file on a machine whose clock is ten minutes fast
    place = ["--url", f"sqlite:///{tmp_path / 'new.db'}"]
    right, fast = Machine(library, timedelta(), *place), Machine(library, OFF, *place)
    assert right.delayline("setup", "--queue", "billing").returncode == 0
    due = datetime.now(UTC) + timedelta(seconds=20)
    assert right.delayline("send", "billing", "hello", "--at", due.isoformat(), "--id", "m").returncode == 0
    # When all messages there are shifted by the difference, as the runbook says
    assert fast.delayline("reschedule", "--all", "--by", "10m", "--yes").returncode == 0
    # Then it dispatches the message when it is due, and not before
    with fast.running():
        eventually(lambda: due_times(right) == {})
        assert datetime.now(UTC) >= due
