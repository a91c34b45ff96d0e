"""The site builds without a warning, every link leads somewhere, and what is generated is fresh."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE_THE_SITE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def test_the_generated_parts_are_what_the_code_says() -> None:
    generate: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = [str(page.relative_to(ROOT)) for page in generate["stale"]()]
    assert not stale, f"run: python docs/generate.py, then commit {stale}"


def test_every_generated_part_is_on_some_page() -> None:
    generate: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    shown = {name for page in generate["pages"]() for _, name, _ in generate["PART"].findall(page.read_text())}
    assert shown == generate["PARTS"].keys()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed: uv sync --group docs")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert not (tmp_path / "site" / "generate.py").exists()


@pytest.mark.parametrize("page", OUTSIDE_THE_SITE, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target and target != "benchmarks/README.md":  # written by `make bench`'s author, not here
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_name_no_folder_of_their_authors() -> None:
    for page in [*OUTSIDE_THE_SITE, *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"/root/|/home/\w|/Users/", page.read_text(encoding="utf-8")), page
