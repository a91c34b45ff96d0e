"""What is declared once is written once: the columns of a stored message, the options of `send`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delayline import Endpoint, MessageContext, Send, SyncEndpoint
from delayline.delayed.columns import STORED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCES = Path(__file__).parents[2] / "src" / "delayline"
COLUMNS = {column.name for column in STORED_COLUMNS}
#: So many names of columns in one literal are a list of a message's columns; fewer are a choice of some.
A_LIST = 4
#: Lists that say what others have: tables of queues, messages of other systems.
OF_OTHERS = {
    "cli/message_file.py": "the keys of a line that users write",
    "cli/send.py": "the help about such a line",
    "filters.py": "the conditions that users write",
    "migration/sources/nservicebus.py": "what the columns of NServiceBus are here",
    "spark/sources.py": "what the columns that users name are here",
    "sql/postgresql/moves.py": "what goes from a store into a queue, in SQL",
    "sql/postgresql/timeouts.py": "what goes from a timeouts table into a queue, in SQL",
}
MOST_FILES_OF_OPTIONS = 4
#: Options that no other function of the package has together.
OPTIONS = set(Send._fields) - {"destination", "body", "headers", "delay", "deliver_at"}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {
        file.relative_to(SOURCES).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(SOURCES.rglob("*.py"))
    }


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def documentation(tree: ast.Module) -> set[int]:
    """Return the ids of the docstrings' nodes, and of texts that stand for themselves."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def lists_of_columns(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Yield the lines of literals that name columns, and the names."""
    skipped = documentation(tree)
    for node in ast.walk(tree):
        names: set[str] = set()
        match node:
            case ast.Constant(value=str() as text) if id(node) not in skipped:
                names = words(text)
            case ast.JoinedStr(values=values):
                texts = [part.value for part in values if isinstance(part, ast.Constant)]
                names = words(" ".join(map(str, texts)))
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements) | ast.Dict(keys=elements):
                named = [item for item in elements if isinstance(item, ast.Constant | ast.Attribute)]
                names = {item.attr if isinstance(item, ast.Attribute) else str(item.value) for item in named}
        if len(names & COLUMNS) >= A_LIST:
            yield getattr(node, "lineno", 0), names & COLUMNS


def files_of_options() -> set[str]:
    """Return the files in which the options of `send` are parameters, fields or arguments of one function or class."""
    files = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    named = {argument.arg for argument in node.args.args + node.args.kwonlyargs}
                case ast.ClassDef():
                    named = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
                case ast.Call():
                    named = {keyword.arg or "" for keyword in node.keywords}
                case _:
                    continue
            if len(OPTIONS & named) > 1 and name != "rabbitmq/amqp/properties.py":  # AMQP's own
                files.add(name)
    return files


def test_columns_of_messages_are_listed_in_their_declaration_only() -> None:
    found = {
        f"{name}:{line}": names
        for name, tree in trees().items()
        if name != "delayed/columns.py"
        for line, names in lists_of_columns(tree)
    }
    listing = {place.partition(":")[0] for place in found}
    assert listing == OF_OTHERS.keys(), f"make these from delayed/columns.py, or take them out here: {found}"


def test_the_options_of_send_stand_in_four_files() -> None:
    assert len(files_of_options()) <= MOST_FILES_OF_OPTIONS, files_of_options()


@pytest.mark.parametrize("send", [Endpoint.send, SyncEndpoint.send, MessageContext.send])
def test_every_send_has_all_options(send: Callable[..., object]) -> None:
    assert set(Send._fields) <= set(inspect.signature(send).parameters)
