"""Classes and protocols stay narrow enough to be read as one subject, and every package has its layer."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "delayline"
MOST_METHODS = 40
MOST_MEMBERS = 15


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (f"{file.relative_to(SOURCES)}: {node.name}", node)
        for file in sorted(SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]


def methods_of(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_interface(name: str, node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
    return "Protocol" in bases or name.startswith("sql/dialect.py")


def test_no_class_has_more_than_40_methods() -> None:
    wide = {name: number for name, node in classes() if (number := len(methods_of(node))) > MOST_METHODS}
    assert not wide, f"move one subject of these into a class of its own, and delete what is doubled: {wide}"


def test_no_protocol_has_more_than_15_members() -> None:
    wide = {}
    for name, node in classes():
        fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
        number = len(methods_of(node) | fields)
        if is_interface(name, node) and number > MOST_MEMBERS:
            wide[name] = number
    assert not wide, f"split these by what their users need, each part typed where it is used: {wide}"


@pytest.mark.parametrize("container", ["delayline", "delayline.sql"])
def test_every_package_has_its_layer(container: str) -> None:
    settings = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = [contract for contract in contracts if container in contract.get("containers", ())]
    assert [contract["exhaustive"] for contract in layers] == [True], f"make the layers of {container} exhaustive"
