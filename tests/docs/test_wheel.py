"""The wheel matches the pages, and its metadata are valid for a package index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from tests import uv

ROOT = Path(__file__).parents[2]
#: The command for newcomers, as on the page.
PAGE = ROOT / "docs" / "how-to" / "spark-dispatch.md"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the wheel that the page's command builds."""
    folder = tmp_path_factory.mktemp("dist")
    [command] = re.findall(r"^\$ (uv build .*) --out-dir dist$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    words = [*uv.command(), *command.split()[1:], "--out-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=100)
    [built] = folder.glob("*.whl")
    return built


def test_the_page_submits_the_wheel_that_its_command_builds(wheel: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"cp dist/{wheel.name} delayline.zip" in page
    assert "--py-files delayline.zip " in page


def test_an_installed_package_copies_its_examples(wheel: Path, tmp_path: Path) -> None:
    """Given an environment with the wheel and its dependencies alone, then the examples are those of the repository."""
    place = tmp_path / "environment"
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(place), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    for variable in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(variable, None)

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    dependencies = ["sync", "--frozen", "--no-default-groups", "--no-install-project", "--python", sys.executable]
    run(*uv.command(), *dependencies, "--project", str(ROOT))
    run(*uv.command(), "pip", "install", "--no-deps", "--python", str(place), str(wheel))

    listed = [line.split()[0] for line in run("delayline", "examples").splitlines()]
    run("delayline", "examples", "--to", "copies")

    tracked = subprocess.run(
        ["git", "ls-files", "examples", "deploy"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {
        file.removeprefix("examples/"): (ROOT / file).read_bytes()
        for file in tracked.stdout.splitlines()
        if not file.startswith("examples/demo/") and file != "examples/reminders/generate.py"
    }
    copies = tmp_path / "copies"
    copied = {str(file.relative_to(copies)): file.read_bytes() for file in copies.rglob("*") if file.is_file()}
    assert copied == expected
    assert {file.rpartition("/")[0] for file in expected} <= set(listed)
    assert run("python", "copies/quickstart/quickstart.py") == "two seconds later: {'order': 17}\n"


def test_a_package_index_shows_no_link_into_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    page = str(metadata.get_payload())
    assert "# delayline" in page
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
