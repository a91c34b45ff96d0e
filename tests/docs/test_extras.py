"""The pages that name an extra, run in an environment that has delayline with that extra and nothing else.

Here every package is installed, so that one that a page or a module needs and no extra brings would not be missed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from tests import uv
from tests.docs.test_pages import (
    AS_A_NEWCOMER,
    ON_A_BROKER,
    ON_POSTGRESQL,
    OURS,
    ROOT,
    blocks_of,
    commands_of,
    name_of,
    session,  # noqa: F401 - a fixture
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.docs.test_pages import Session
    from tests.servers.rabbitmq import RabbitmqServer

PATIENCE = 500.0
PIP = "pip install "
DELAYLINE = re.compile(r"delayline(?:\[([a-z,]+)\])?")
#: Extras whose pages show what runs on a server that tests do not have, and what imports each.
WITHOUT_PAGES = {
    "azure": "delayline.azure",
    "mariadb": "pymysql",
    "mysql": "pymysql",
    "pymssql": "pymssql",
    "rabbitmq": "delayline.rabbitmq",
    "sqlite": "aiosqlite",
    "sqlserver": "mssql_python",
    "testing": "delayline.testing",
}


def installed_by(page: Path) -> list[str]:
    """Return the packages that the commands of a page install."""
    commands = [
        command for block in blocks_of(page) if block.language == "console" for command, _ in commands_of(block.text)
    ]
    return [word for command in commands if command.startswith(PIP) for word in shlex.split(command)[2:]]


def extras_of(packages: list[str]) -> list[str]:
    found = filter(None, map(DELAYLINE.fullmatch, packages))
    return sorted({extra for one in found for extra in (one[1] or "").split(",") if extra})


def others_of(packages: list[str]) -> list[str]:
    return [one for one in packages if DELAYLINE.fullmatch(one) is None and one != "."]


PAGES = [page for page in OURS if extras_of(installed_by(page)) or others_of(installed_by(page))]
PAGES = [page for page in PAGES if page.name != "installation.md"]


class Environments:
    """Environments of their own, made once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], Path] = {}

    def with_only(self, extras: list[str], others: list[str]) -> Path:
        """Return an environment that has delayline with these extras, and these other packages."""
        key = (*extras, "", *others)
        if key not in self._made:
            place = self._folder / f"environment-{len(self._made)}"
            words = ["sync", "--frozen", "--no-default-groups", "--python", sys.executable, "--project", str(ROOT)]
            words += [word for extra in extras for word in ("--extra", extra)]
            made = self._uv([*words, "--offline"], place)
            if made.returncode != 0:  # not all of it is in uv's cache
                made = self._uv(words, place)
            assert made.returncode == 0, made.stderr
            if others:
                made = self._uv(["pip", "install", "--python", str(place), *others], place)
                assert made.returncode == 0, made.stderr
            self._made[key] = place
        return self._made[key]

    def _uv(self, words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(place)}
        return subprocess.run(
            [*uv.command(), "--quiet", *words],
            env=variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    return Environments(tmp_path_factory.mktemp("environments"))


@pytest.fixture
def enter(environments: Environments, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Path]:
    """Provide a function that makes `python` that of an environment with these packages only."""

    def change(packages: list[str]) -> Path:
        place = environments.with_only(extras_of(packages), others_of(packages))
        monkeypatch.setenv("PATH", f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}")
        for variable in ("PYTHONPATH", "VIRTUAL_ENV"):
            monkeypatch.delenv(variable, raising=False)
        return place

    return change


def run(page: Path, session: Session) -> None:  # noqa: F811
    session.elsewhere = True
    for block in blocks_of(page):
        session.run(block)


@pytest.mark.timeout(900)
def test_the_first_page_of_spark_works_with_its_extra_alone(
    session: Session,  # noqa: F811
    enter: Callable[[list[str]], Path],
) -> None:
    """The sample for `make test`: the extra that has most modules, and packages that uv's cache has."""
    page = next(page for page in PAGES if page.name == AS_A_NEWCOMER)
    assert extras_of(installed_by(page)) == ["spark"]
    enter(installed_by(page))
    run(page, session)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ON_A_BROKER + ON_POSTGRESQL], ids=name_of)
def test_a_page_works_with_the_packages_that_it_names_alone(
    page: Path,
    session: Session,  # noqa: F811
    enter: Callable[[list[str]], Path],
) -> None:
    enter(installed_by(page))
    run(page, session)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page in ON_POSTGRESQL], ids=name_of)
def test_a_page_works_on_postgresql_with_the_packages_that_it_names_alone(
    page: Path,
    session: Session,  # noqa: F811
    enter: Callable[[list[str]], Path],
    postgresql_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", postgresql_url)
    enter(installed_by(page))
    run(page, session)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ON_A_BROKER, ids=name_of)
def test_a_page_on_a_broker_works_with_rabbitmqs_extra_alone(
    page: Path,
    session: Session,  # noqa: F811
    enter: Callable[[list[str]], Path],
    rabbitmq: RabbitmqServer,
    rabbitmq_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", f"{rabbitmq_url}?management={rabbitmq.management_url}")
    enter(["delayline[rabbitmq]"])
    run(page, session)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", WITHOUT_PAGES)
def test_an_extra_brings_what_its_part_imports(extra: str, enter: Callable[[list[str]], Path]) -> None:
    place = enter([f"delayline[{extra}]"])
    done = subprocess.run(
        [place / "bin" / "python", "-c", f"import delayline, delayline.cli, {WITHOUT_PAGES[extra]}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_extra_is_run_alone() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    on_pages = {extra for page in PAGES for extra in extras_of(installed_by(page))}
    assert set(declared) == on_pages | set(WITHOUT_PAGES)
