"""AGENTS.md, the page for those who come anew: short, and true of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`((?:src|tests|docs|benchmarks)[\w./-]*|\w+\.(?:md|toml))`")
TARGET = re.compile(r"`make ([a-z-]+)`")


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 120


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(PAGE))))
def test_what_it_names_is_there(place: str) -> None:
    assert (ROOT / place).exists()


@pytest.mark.parametrize("target", sorted(set(TARGET.findall(PAGE))))
def test_its_commands_are_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
