"""`delayline run --processes N --reload`: processes that are kept running, as one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.cli.conftest import Result, delayline_process, messages_in
from tests.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = """
import asyncio, os, pathlib
from delayline import *

VERSION = 1
shop = Endpoint.from_settings("shop")

@shop.handler
async def handle(message, context):
    pathlib.Path(f"handling-{message.text}").touch()
    while message.text.startswith("slow") and not pathlib.Path("go-on").exists():
        await asyncio.sleep(0.05)
    pathlib.Path(f"handled-{message.text}-{VERSION}").write_text(str(os.getpid()))

class Broken(MemoryTransport):
    async def start(self):
        raise BackendUnavailable("away")

broken = Endpoint("broken", transport=Broken())
"""
HEALTH = ("--health", "127.0.0.1:0")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def shop(run: Callable[..., Result], folder: Path) -> Callable[..., Result]:
    (folder / "shop.py").write_text(MODULE)
    assert run("setup", "--endpoint", "shop").code == 0
    return run


class Running:
    """A supervisor, its workers and its port."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().split("serves ")[1].split("/live")[0]

    def probe(self, path: str) -> Any:  # noqa: ANN401 - JSON
        return httpx.get(f"{self.address}/{path}", timeout=60).json()

    def is_ready(self) -> bool:
        return bool(self.probe("ready")["ok"])

    def workers(self) -> list[int]:
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in children.stdout.split()]


@pytest.fixture
def start(processes: list[subprocess.Popen[str]]) -> Callable[..., Running]:
    def begin(*arguments: str) -> Running:
        process = delayline_process("run", *arguments, *HEALTH)
        processes.append(process)
        running = Running(process)
        eventually(running.is_ready)
        return running

    return begin


def test_a_process_that_is_killed_is_started_again(start: Callable[..., Running], shop: Callable[..., Result]) -> None:
    # Given two processes with one port, whose metrics do not clash
    running = start("shop:shop", "--processes", "2")
    first, second = running.workers()
    scraped = httpx.get(f"{running.address}/metrics", timeout=60).text
    of_each = [line for line in scraped.splitlines() if line.startswith("delayline_handlers_running{")]
    assert len(of_each) == 2
    assert [f'delayline_process="{number}"' in line for number, line in enumerate(of_each, 1)] == [True, True]
    assert scraped.count("# TYPE delayline_handlers_running gauge") == 1
    # When one is killed
    os.kill(first, signal.SIGKILL)
    # Then another takes its place, and messages are handled
    eventually(lambda: len(set(running.workers()) - {first}) == 2)
    eventually(running.is_ready)
    assert second in running.workers()
    shop("send", "shop", "x", "--endpoint", "shop")
    eventually(Path("handled-x-1").exists)
    # When they are asked to stop
    running.process.send_signal(signal.SIGTERM)
    out, err = running.process.communicate(timeout=120)
    # Then all end
    assert running.process.returncode == 0
    assert out.splitlines()[-1] == "2 processes stopped"
    assert "process 1 ended by SIGKILL; it is started again in 1 s" in err


def test_a_signal_waits_for_the_handlers_of_all(
    processes: list[subprocess.Popen[str]], shop: Callable[..., Result]
) -> None:
    shop("send", "shop", "slow", "--endpoint", "shop")
    process = delayline_process("run", "shop:shop", "--processes", "2", "--json")
    processes.append(process)
    eventually(Path("handling-slow").exists)
    process.send_signal(signal.SIGINT)
    Path("go-on").touch()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out) == {"targets": ["shop:shop"], "processes": 2, "stopped_by": "SIGINT"}
    assert Path("handled-slow-1").exists()


def test_a_second_signal_ends_all_at_once(start: Callable[..., Running], shop: Callable[..., Result]) -> None:
    running = start("shop:shop", "--processes", "2")
    workers = running.workers()
    shop("send", "shop", "slow", "--endpoint", "shop")
    eventually(Path("handling-slow").exists)
    while running.process.poll() is None:
        running.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(0.2)
    assert running.process.returncode == -signal.SIGTERM
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not Path("handled-slow-1").exists()
    assert [message.text for message in messages_in("shop")] == ["slow"]


def test_workers_stop_when_the_supervisor_is_killed(start: Callable[..., Running]) -> None:
    running = start("shop:shop", "--processes", "2")
    workers = running.workers()
    running.process.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_frozen_process_is_not_alive(start: Callable[..., Running]) -> None:
    running = start("shop:shop", "--processes", "2")
    first, _ = running.workers()
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not running.probe("live")["ok"])
    assert "process 1: has not answered for" in running.probe("live")["reasons"][0]
    assert 'delayline_process="2"' in httpx.get(f"{running.address}/metrics", timeout=60).text
    os.kill(first, signal.SIGCONT)
    eventually(lambda: running.probe("live")["ok"])


def test_a_change_of_the_source_waits_for_the_handlers(
    start: Callable[..., Running], shop: Callable[..., Result]
) -> None:
    # Given a handler at work
    running = start("shop:shop", "--reload")
    shop("send", "shop", "slow", "--endpoint", "shop")
    eventually(Path("handling-slow").exists)
    (worker,) = running.workers()
    # When the source changes, to one that is wrong and then to one that is right
    Path("shop.py").write_text("open('imported-wrong', 'w').close()\n1 / 0\n")
    eventually(lambda: not running.is_ready())
    assert running.workers() == [worker]
    Path("go-on").touch()
    # Then the handler finishes as it began
    eventually(Path("handled-slow-1").exists)
    eventually(Path("imported-wrong").exists)
    eventually(lambda: running.workers() == [])
    Path("shop.py").write_text(MODULE.replace("VERSION = 1", "VERSION = 2"))
    eventually(running.is_ready)
    shop("send", "shop", "x", "--endpoint", "shop")
    eventually(Path("handled-x-2").exists)
    running.process.send_signal(signal.SIGTERM)
    _, err = running.process.communicate(timeout=120)
    assert running.process.returncode == 0
    assert "shop.py changed" in err
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["shop:nothing"], "module 'shop' has no 'nothing'"),
        (["shop:broken", "--concurrency", "3"], "--concurrency would have no effect"),
    ],
)
def test_wrong_usage_ends_it(processes: list[subprocess.Popen[str]], words: list[str], error: str) -> None:
    process = delayline_process("run", *words, "--processes", "2")
    processes.append(process)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error in err


def test_one_that_cannot_start_is_tried_again(processes: list[subprocess.Popen[str]]) -> None:
    process = delayline_process("run", "shop:broken", "--processes", "2")
    processes.append(process)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("it is started again in 2 s" in line for line in lines)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 0
