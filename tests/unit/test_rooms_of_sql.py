"""Classes of the SQL package stay narrow enough to be read as one subject."""

from __future__ import annotations

import ast
from pathlib import Path

import delayline.sql

FOLDER = Path(delayline.sql.__file__).parent
MOST_METHODS = 40
MOST_MEMBERS = 15


def test_no_class_has_more_methods_and_no_interface_more_members() -> None:
    wide = []
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
                fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
                is_interface = "Protocol" in map(ast.unparse, node.bases) or file.name == "dialect.py"
                if len(methods) > MOST_METHODS or (is_interface and len(methods | fields) > MOST_MEMBERS):
                    wide.append(f"{file.relative_to(FOLDER)}: {node.name}")
    assert wide == []
