"""Nothing outside the back ends' own packages asks which scheme or product it has: it asks the back end."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import delayline
from delayline.backends import OWN_BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE: Final = Path(delayline.__file__).parent
#: Where a scheme is known: each package knows its own; sources of migrations are systems of others, as Django's
#: databases are.
KNOWING: Final = (
    "backends.py", "memory/", "azure/", "rabbitmq/", "sql/", "migration/sources/", "contrib/django/database_url.py",
)  # fmt: skip
#: Where a product is known: its package, what finds that by a URL, and what tells users' own connections apart.
PRODUCTS: Final = (
    "sql/backend.py", "sql/databases.py", "sql/postgresql/", "sql/mariadb/", "sql/sqlite/", "sql/sqlserver/",
    "sql/enlisting.py", "sql/external.py",
)  # fmt: skip


def texts_in(node: ast.AST) -> Iterator[str]:
    return (leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str))


def compared(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that code branches on: in comparisons, cases and `startswith`."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare() | ast.match_case():
                yield from texts_in(node if isinstance(node, ast.Compare) else node.pattern)
            case ast.Call(func=ast.Attribute(attr="startswith"), args=parts):
                for part in parts:
                    yield from texts_in(part)


def constants(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module's constants, which its functions may compare with."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield from texts_in(node.value)


def schemes_of(code: str, *, with_constants: bool) -> set[str]:
    """Return the schemes that code compares with, in any spelling."""
    tree = ast.parse(code)
    words = {*compared(tree), *(constants(tree) if with_constants else ())}
    return {word for word in words if word.removesuffix("//").removesuffix(":").lower() in OWN_BACKENDS}


def modules(*left_out: str, within: str = "") -> Iterator[tuple[str, str]]:
    for file in sorted((SOURCE / within).rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith(left_out):
            yield name, file.read_text(encoding="utf-8")


def test_code_branches_on_schemes_in_the_back_ends_only() -> None:
    found = {name: schemes_of(code, with_constants=True) for name, code in modules(*KNOWING)}
    assert {name: schemes for name, schemes in found.items() if schemes} == {}


def test_sql_branches_on_products_in_their_packages_only() -> None:
    found = {name: schemes_of(code, with_constants=False) for name, code in modules(*PRODUCTS, within="sql")}
    assert {name: schemes for name, schemes in found.items() if schemes} == {}


@pytest.mark.parametrize(
    "code",
    [
        "if scheme_of(url) == 'azure': ...",
        "if url.startswith(('amqp://', 'amqps://')): ...",
        "match scheme:\n    case 'memory': ...",
        "BROKERS: Final = ('amqp', 'amqps')",
        "SQL = frozenset({'sqlite', 'mssql'})",
        "work(dialect.product == 'PostgreSQL')",
    ],
)
def test_every_way_to_branch_is_seen(code: str) -> None:
    assert schemes_of(code, with_constants=True)
