"""Helpers of the command line's tests: a temporary folder, and ways to run `delayline` in it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from delayline import Message, SqlTransport
from delayline.cli import main
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

URL = "sqlite:///delayline.db"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:  # noqa: ANN401 - JSON has no narrower type
        return json.loads(self.out)


Run = "Callable[..., Ran]"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("DELAYLINE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYLINE_ENDPOINT", "sales")
    return tmp_path


@pytest.fixture(autouse=True)
def modules(folder: Path) -> Iterator[None]:
    """Forget the modules of the folder, whose names other tests use too."""
    path, known = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def run() -> Callable[..., Result]:
    def call(*arguments: str, input: str | None = None) -> Result:
        result = CliRunner().invoke(main, list(arguments), input=input, prog_name="delayline")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Result(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def ready(run: Callable[..., Result]) -> Callable[..., Result]:
    """The command line in a folder where `delayline setup` has run."""
    assert run("setup", "--queue", "billing").code == 0
    return run


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def delayline_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "delayline", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def put(queue: str, messages: Sequence[Message], url: str = URL) -> None:
    async def work() -> None:
        transport = SqlTransport(url)
        await transport.start()
        try:
            await transport.dispatch([TransportOperation(message, queue) for message in messages])
        finally:
            await transport.stop()

    asyncio.run(work())


def messages_in(queue: str) -> list[Message]:
    async def work() -> list[Message]:
        transport = SqlTransport(URL)
        await transport.start()
        try:
            return list(await transport.browse(queue, 1000))
        finally:
            await transport.stop()

    return asyncio.run(work())
