from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest
from tests.cli.conftest import Result

from delayline.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(path) or "delayline")
def test_every_help_shows_an_example(run: Callable[..., Result], path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        ran = run(*path, flag)
        assert ran.code == 0
        assert f"\n  Example:\n    delayline {' '.join(path)}" in ran.out
        assert max(map(len, ran.out.splitlines())) <= 120


def test_help_does_not_wait_for_sqlalchemy() -> None:
    program = (
        "import sys; from delayline.cli import main; main(['send', '--help'], standalone_mode=False); "
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_version_is_reported(run: Callable[..., Result]) -> None:
    assert run("--version").out.startswith("delayline, version ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["send", "--nonsense"], ["pending", "--limit", "0"], ["cancel"]])
def test_wrong_usage_exits_with_2(run: Callable[..., Result], arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["setup"],
        ["pending"],
        ["cancel", "x"],
        ["send", "a", "b"],
        ["doctor"],
        ["run"],
        ["reschedule", "x", "--delay", "1s"],
    ],
)
def test_a_wrong_setting_exits_with_2_and_no_stack_trace(run: Callable[..., Result], arguments: list[str]) -> None:
    ran = run(*arguments, "--url", "oracle://me:secret@host/db")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: no ")
    assert "the supported schemes are" in ran.err.lower()
    assert "secret" not in ran.err


def test_an_endpoint_has_to_be_named(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELAYLINE_ENDPOINT")
    for command in (["setup"], ["pending"], ["doctor"], ["run"], ["send", "a", "b"], ["cancel", "x"]):
        ran = run(*command)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("error: no endpoint is named: use --endpoint NAME")
