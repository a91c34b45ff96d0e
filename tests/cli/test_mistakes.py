"""Mistakes at the command line: each is named, in the form that was asked for, with the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import messages_in

from delayline import Headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result


@pytest.mark.parametrize("command", [["pending"], ["send", "billing", "x", "--delay", "5m"], ["cancel", "x"]])
def test_a_misspelt_endpoint_is_answered_with_those_that_exist(
    ready: Callable[..., Result], command: list[str]
) -> None:
    assert ready("setup", "--endpoint", "reminders").code == 0
    answer = ready(*command, "--endpoint", "remindrs")
    assert answer.code == 1
    assert "no endpoint 'remindrs' is set up there; did you mean 'reminders'?" in answer.err
    assert "Endpoints there: reminders, sales" in answer.err


def test_the_doctor_names_the_endpoints_that_exist(ready: Callable[..., Result]) -> None:
    assert "did you mean 'sales'? Endpoints there: sales" in ready("doctor", "--endpoint", "salse").out
    assert "Endpoints there" not in ready("doctor").out


@pytest.mark.parametrize(
    "words",
    [
        ["send", "billing"],
        ["send", "billing", "x", "--at", "2020-01-01T00:00:00Z"],
        ["send", "billing", "x", "--delay", "5m", "--at", "2097-01-01T00:00:00Z"],
        ["send", "billing", "x", "--delay", "5x"],
        ["send", "billing", "{x", "--json-body"],
        ["send", "--from", "rows.csv", "--type", "Bill"],
        ["send", "billing", "x", "--header", "x"],
        ["send", "billing", "x", "--id", "x" * 251],
        ["reschedule", "x"],
        ["reschedule", "x", "--at", "2020-01-01T00:00:00Z"],
        ["pending", "--bucket", "1d"],
        ["pending", "--count", "--bucket", "0s"],
        ["pending", "--limit", "-1"],
        ["cancel"],
        ["errors", "retry"],
        ["errors", "lst"],
        ["limit", "billing"],
        ["run", "shop"],
        ["run", "nowhere:endpoint"],
        ["setpu"],
        ["rabbitmq", "verify", "--url", "sqlite:///x.db"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_exit_code_2_and_json_on_request(ready: Callable[..., Result], words: list[str]) -> None:
    Path("rows.csv").write_text("destination,body,delay\n")
    plain, machine = ready(*words), ready(*words, "--json")
    assert (plain.code, plain.out) == (2, "")
    assert plain.err
    assert machine.code == 2
    error = machine.document["error"]
    assert error["text"]
    assert error["type"]


def test_a_failure_is_json_on_request(ready: Callable[..., Result]) -> None:
    answer = ready("send", "nowhere", "x", "--delay", "5m", "--json")
    assert answer.code == 1
    assert answer.document["error"]["type"] == "QueueNotFound"
    assert "--no-check-destination" in answer.document["error"]["text"]
    assert ready("errors", "show", "x", "--json").document["error"]["type"] == "MessageNotFound"


def test_a_typed_message_is_sent(ready: Callable[..., Result]) -> None:
    assert ready("send", "billing", '{"order": 1.10}', "--type", "shop.Bill", "--json-body").code == 0
    (message,) = messages_in("billing")
    assert message.headers[Headers.ENCLOSED_MESSAGE_TYPES] == "shop.Bill"
    assert message.headers[Headers.CONTENT_TYPE] == "application/json"
    assert message.text == '{"order": 1.10}'


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("def f(:", "SyntaxError"),
        ("import nonexistent", "ModuleNotFoundError: No module named 'nonexistent'"),
        ("import other", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_shows_its_own_frames(
    ready: Callable[..., Result], program: str, line: str
) -> None:
    Path("broken_shop.py").write_text(program)
    Path("other.py").write_text("1 / 0")
    answer = ready("run", "broken_shop:endpoint", "--json")
    assert answer.code == 1
    assert "module 'broken_shop' cannot be imported: " in answer.document["error"]["text"]
    assert line in answer.err
    frames = [text for text in answer.err.splitlines() if text.lstrip().startswith("File ")]
    assert frames
    assert all("broken_shop.py" in frame or "other.py" in frame for frame in frames)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(run: Callable[..., Result], shell: str) -> None:
    script = run("completion", shell)
    assert script.code == 0
    assert f"_DELAYLINE_COMPLETE={shell}_complete" in script.out
    assert run("completion", "tcsh").code == 2


def test_completion_is_answered_by_the_command() -> None:
    environment = {"COMP_WORDS": "delayline comp", "COMP_CWORD": "1", "_DELAYLINE_COMPLETE": "bash_complete"}
    command = [sys.executable, "-m", "delayline"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["plain,completion"]


def test_errors_of_every_command_are_documented_json(run: Callable[..., Result]) -> None:
    answer = run("pending", "--url", "x.db", "--json")
    assert answer.code == 2
    assert list(json.loads(answer.out)) == ["error"]
    assert "url" in answer.err
