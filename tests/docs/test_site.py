"""The site builds without a warning, all links lead to pages, and generated pages are fresh."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import delayline.errors

ROOT = Path(__file__).parents[2]
OUTSIDE_THE_SITE = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def test_the_generated_parts_are_up_to_date() -> None:
    generate: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    stale = [str(page.relative_to(ROOT)) for page in generate["stale"]()]
    assert not stale, f"run: python docs/generate.py, then commit {stale}"


def test_every_generated_part_is_on_some_page() -> None:
    generate: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    shown = {name for page in generate["pages"]() for _, name, _ in generate["PART"].findall(page.read_text())}
    assert shown == generate["PARTS"].keys()


def pages_in(part: str | list[Any] | dict[str, Any]) -> list[str]:
    """Return the pages of a part of the navigation, those of its groups too."""
    if isinstance(part, str):
        return [part]
    return [page for inner in (part.values() if isinstance(part, dict) else part) for page in pages_in(inner)]


def test_the_start_page_links_every_page_in_the_groups_of_the_navigation() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]  # noqa: S506 - of strings
    groups = [(title, pages_in(pages)) for part in nav if isinstance(part, dict) for title, pages in part.items()]
    listed = re.split(r"^## (.+)$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert listed[::2] == [title for title, _ in groups]
    for (title, pages), text in zip(groups, listed[1::2], strict=True):
        assert set(re.findall(r"\]\(([\w/-]+\.md)\)", text)) == set(pages), title
    on_disk = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for _, pages in groups for page in pages} == on_disk - {"index.md"}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        pytest.skip("mkdocs is not installed: uv sync --group docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert not (site / "generate.py").exists()
    assert not (site / "mermaid.sh").exists()


class Fetched(HTMLParser):
    """The files that a browser fetches for a page, without the links that a reader may follow."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of one tag."""
        values = {name: value or "" for name, value in attrs}
        if tag != "a":
            names = ("src", "srcset", "data", "poster", "style", *(("href",) if tag == "link" else ()))
            self.addresses += [values[name] for name in names if name in values]

    def handle_data(self, data: str) -> None:
        """Collect what styles inside the page import."""
        self.addresses += re.findall(r"url\([^)]*\)|@import[^;]*", data)


def test_the_site_needs_no_other_server(site: Path) -> None:
    elsewhere = re.compile(r"(?:https?:)?//\w")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        fetched = Fetched(page.read_text(encoding="utf-8")).addresses
        assert any("bundle" in address for address in fetched), "the search for addresses finds the site's own script"
        assert not [address for address in fetched if elsewhere.search(address)], page
    for style in site.rglob("*.css"):
        for address in re.findall(r"url\(([^)]*)\)|@import([^;]*)", style.read_text(encoding="utf-8")):
            assert not elsewhere.match("".join(address).strip("\"' ")), style


def test_pages_with_diagrams_load_mermaid(site: Path) -> None:
    if not (site / "assets" / "mermaid.min.js").exists():
        assert not os.environ.get("DELAYLINE_REQUIRE_SERVICES"), "Mermaid is missing: run make setup"
        pytest.skip("Mermaid is missing: run make setup")
    with_diagrams = [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text(encoding="utf-8")]
    assert site / "index.html" in with_diagrams
    for page in with_diagrams:
        scripts = [one for one in Fetched(page.read_text(encoding="utf-8")).addresses if one.endswith("mermaid.min.js")]
        assert [(page.parent / script).exists() for script in scripts] == [True], page


@pytest.mark.parametrize("page", OUTSIDE_THE_SITE, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target and target != "benchmarks/README.md":  # written by `make bench`'s author, not here
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_name_no_folder_of_their_authors() -> None:
    for page in [*OUTSIDE_THE_SITE, *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"/root/|/home/\w|/Users/", page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize(
    "module", ["delayline", "spi", "timeouts", "testing", "searching", "spark", "migration", "sql.shards"]
)
def test_the_api_reference_lists_every_exported_name(module: str) -> None:
    exporting = importlib.import_module("delayline" if module == "delayline" else f"delayline.{module}")
    page = (ROOT / "docs" / "reference" / "api" / f"{module.rpartition('.')[2]}.md").read_text(encoding="utf-8")
    listed = [line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")]
    assert sorted(listed) == sorted(exporting.__all__)


def test_the_api_reference_lists_every_error() -> None:
    pages = [ROOT / "docs" / "reference" / "api" / f"{module}.md" for module in ("delayline", "errors")]
    listed = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    for name, member in vars(delayline.errors).items():
        if inspect.isclass(member) and issubclass(member, Exception):
            assert listed.count(f"::: delayline.errors.{name}") == 1, name
