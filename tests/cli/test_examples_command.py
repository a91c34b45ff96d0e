"""`delayline examples`: what it refuses, and its JSON. tests/docs/test_wheel.py runs it from a wheel."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from delayline.cli import main

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["examples", *words])


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    result = run("quickstrat")

    assert result.exit_code == 2
    assert "there is no example 'quickstrat': did you mean quickstart" in result.stderr


def test_a_file_is_printed_as_it_is() -> None:
    assert run("quickstart/quickstart.py").stdout == (QUICKSTART / "quickstart.py").read_text(encoding="utf-8")


def test_an_example_is_shown_by_its_readme_and_its_files() -> None:
    shown = run("quickstart").stdout

    assert shown.startswith("# Quickstart\n")
    assert shown.splitlines()[-1] == "quickstart/quickstart.py"
    assert "A unit for an endpoint" in run("deploy/systemd").stdout


def test_no_file_is_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "quickstart" / "quickstart.py"
    kept.parent.mkdir()
    kept.write_text("mine")

    result = run("quickstart", "--to", str(tmp_path))

    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert kept.read_text() == "mine"
    assert not (kept.parent / "README.md").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    result = run("quickstart", "--to", str(tmp_path / "file" / "below"))

    assert result.exit_code == 2
    assert "cannot be written: Not a directory" in result.stderr


def test_json_is_one_document(tmp_path: Path) -> None:
    listed = json.loads(run("--json").stdout)["examples"]
    assert {"name": "quickstart", "what": "Quickstart", "files": ["README.md", "quickstart.py"]} in listed
    assert json.loads(run("quickstart", "--json").stdout)["files"] == ["README.md", "quickstart.py"]
    assert "asyncio" in json.loads(run("quickstart/quickstart.py", "--json").stdout)["text"]
    copied = json.loads(run("quickstart", "--to", str(tmp_path), "--json").stdout)["copied"]
    assert copied == [str(tmp_path / "quickstart" / name) for name in ("README.md", "quickstart.py")]
