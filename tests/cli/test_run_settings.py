"""`delayline run MODULE:ENDPOINT` uses what was given to it, or refuses it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import Result, delayline_process
from tests.eventually import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

MODULE = """
from pathlib import Path
from delayline import *

made = Endpoint.from_settings("shop", send_only=False)
in_code = Endpoint("shop", url="sqlite:///shop.db", concurrency=4)
on_a_broker = Endpoint("shop", url="amqp://me:hidden@broker/shop")
in_memory = Endpoint("shop", transport=MemoryTransport())

@made.handler
async def handle(message, context):
    Path("handled").write_text(f"{made.concurrency} {message.text}")
"""


@pytest.fixture(autouse=True)
def shop(folder: Path) -> None:
    (folder / "shop.py").write_text(MODULE)


@pytest.mark.parametrize(
    ("target", "flags", "variables", "words"),
    [
        ("in_code", ["--url", "sqlite:///other.db", "--batch-size", "3"], {}, ["--url, --batch-size would have no"]),
        ("in_code", ["--concurrency", "4"], {}, ["--concurrency would have no effect", "from_settings('shop')"]),
        ("in_code", ["--endpoint", "bill"], {}, ["--endpoint 'bill' is another endpoint than 'shop'"]),
        ("made", ["--endpoint", "bill"], {}, ["--endpoint 'bill' is another endpoint than 'shop'"]),
        ("in_code", [], {"URL": "sqlite:///other.db"}, ["variable DELAYLINE_URL", "sqlite:///other.db", "shop.db'"]),
        ("in_code", [], {"URL": "postgresql://me:hidden@host/db"}, ["postgresql://me:***@host/db", "shop.db'"]),
        ("in_code", [], {"STORE_URL": "sqlite:///other.db"}, ["store_url = ", "shop.db'"]),
        ("in_code", [], {"CONCURRENCY": "5"}, ["concurrency = 5", "DELAYLINE_CONCURRENCY", "uses 4"]),
        ("in_code", [], {"NUMBER_OF_RETRIES": "5"}, ["number_of_retries = 5", "uses 0"]),
        ("on_a_broker", [], {"URL": "amqp://me:hidden@broker/bill"}, ["broker/bill'", "broker:5672/shop'"]),
        ("in_memory", [], {"URL": "sqlite:///shop.db"}, ["sqlite:///shop.db", "uses 'MemoryTransport'"]),
    ],
)
def test_what_the_endpoint_does_not_use_is_refused(
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    flags: list[str],
    variables: dict[str, str],
    words: list[str],
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "shop", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"DELAYLINE_{name}", value)
    refused = run("run", f"shop:{target}", *flags)
    assert (refused.code, refused.out) == (2, "")
    assert all(word in refused.err for word in words), refused.err
    assert "hidden" not in refused.err


def test_an_endpoint_of_settings_has_the_flags(
    run: Callable[..., Result], processes: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a file, a variable and a flag that say different things
    Path("delayline.toml").write_text("concurrency = 2")
    monkeypatch.setenv("DELAYLINE_URL", "sqlite:///nowhere.db")
    given = ("--url", "sqlite:///orders.db")
    assert run("setup", "--endpoint", "shop", *given).code == 0
    assert run("send", "shop", "hello", "--endpoint", "shop", *given).code == 0
    # When it is run with the flag
    process = delayline_process("run", "shop:made", *given, "--concurrency", "7")
    processes.append(process)
    # Then it takes the message from there
    eventually(lambda: Path("handled").exists() and Path("handled").read_text() == "7 hello")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not Path("nowhere.db").exists()


def test_settings_that_agree_and_those_that_cannot_be_compared(
    processes: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", "sqlite:///shop.db")
    monkeypatch.setenv("DELAYLINE_JOURNAL", "true")
    process = delayline_process("run", "shop:in_code", "--json")
    processes.append(process)
    eventually(Path("shop.db").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert json.loads(out)["stopped_by"] == "SIGTERM"
    assert "reads no settings: journal (from the variable DELAYLINE_JOURNAL)" in err


def test_the_local_file_is_named_at_start(processes: list[subprocess.Popen[str]]) -> None:
    process = delayline_process("run", "shop:made")
    processes.append(process)
    assert process.stdout is not None
    assert "Its messages are in the local file delayline.db." in process.stdout.readline()
