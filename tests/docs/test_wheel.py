"""The wheel matches the pages, and its metadata are valid for a package index."""

from __future__ import annotations

import re
import subprocess
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


def test_a_package_index_shows_no_link_into_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    page = str(metadata.get_payload())
    assert "# delayline" in page
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
