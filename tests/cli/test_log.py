"""Logs of `delayline run` and `delayline dashboard`: as JSON, every line that they print is a document."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.cli.conftest import delayline_process
from tests.eventually import PATIENCE, eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.cli.conftest import Result

AWAY = "postgresql://127.0.0.1:1/shop"
TOKEN = "a-token-of-enough-characters"  # noqa: S105 - not one

MODULE = """
import asyncio
import logging
import threading
import warnings
from pathlib import Path

from delayline import Endpoint

endpoint = Endpoint.from_settings("shop")
logging.getLogger("shop.orders").info("imported")
warnings.warn("an old call", stacklevel=1)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()


@endpoint.handler
async def handle(message, context):
    asyncio.get_running_loop().call_soon(lambda: [].pop())
    Path("handled").touch()
"""


def documents(*outputs: str) -> list[dict[str, Any]]:
    """Return the documents of the lines, each of which has to be one."""
    return [json.loads(line) for output in outputs for line in output.splitlines()]


def test_every_line_is_json_whoever_writes_it(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    """Given a module that logs, warns and fails in several ways, when it runs, then each line is a document."""
    Path("shop.py").write_text(MODULE)
    assert ready("setup", "--endpoint", "shop").code == 0
    assert ready("send", "shop", "x").code == 0
    process = delayline_process("run", "shop:endpoint", "--log-format", "json", "--health", "127.0.0.1:0")
    processes.append(process)
    eventually(Path("handled").exists)
    process.send_signal(signal.SIGTERM)
    found = documents(*process.communicate(timeout=PATIENCE))
    texts = {(document["logger"], document["level"]): document["text"] for document in found}
    assert texts["shop.orders", "info"] == "imported"
    assert "an old call" in texts["py.warnings", "warning"]
    [uncaught] = [document for document in found if document.get("event") == "command.uncaught"]
    assert "ZeroDivisionError" in uncaught["exception"]
    [failed] = [document for document in found if document["logger"] == "asyncio" and document["level"] == "error"]
    assert "IndexError" in failed["exception"]
    said = [document["text"] for document in found if document.get("event") == "command.said"]
    assert said[0].startswith("serves http://127.0.0.1:")
    assert said[1].startswith("shop runs:")
    assert said[-1] == "shop stopped"


def test_a_failed_start_ends_with_its_error_as_json(ready: Callable[..., Result]) -> None:
    process = delayline_process("run", "--endpoint", "shop", "--url", AWAY, "--log-format", "json")
    out, err = process.communicate(timeout=PATIENCE)
    last = documents(out, err)[-1]
    assert process.returncode == 1
    assert (last["level"], last["event"]) == ("error", "command.said")
    assert "127.0.0.1" in last["text"]


def test_a_module_that_raises_ends_with_its_error_as_json(ready: Callable[..., Result]) -> None:
    Path("shop.py").write_text("raise ValueError('no configuration')")
    process = delayline_process("run", "shop:endpoint", "--log-format", "json")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "no configuration" in documents(out, err)[-1]["text"]


def test_the_dashboard_logs_its_start_sign_ins_and_refusals(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_DASHBOARD_TOKEN", TOKEN)
    process = delayline_process("dashboard", "--listen", "127.0.0.1:0", "--log-format", "json")
    processes.append(process)
    assert process.stderr is not None
    start = json.loads(process.stderr.readline())
    assert start["text"].startswith("dashboard at http://")
    url = start["text"].split()[2].rstrip(",")
    assert httpx.get(url, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE)
    events = [document["event"] for document in documents(out, err)]
    assert events == ["dashboard.sign_in_failed", "dashboard.signed_in", "dashboard.refused"]
    assert TOKEN not in out + err


def test_the_dashboard_logs_only_what_the_level_lets_through(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    process = delayline_process("dashboard", "--listen", "127.0.0.1:0", "--log-level", "error")
    processes.append(process)
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(",")
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    process.terminate()
    assert process.communicate(timeout=PATIENCE)[1] == ""
