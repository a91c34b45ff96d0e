"""Prints tables for people, a JSON document for machines, and plain text without a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from delayline.events import Event, emit

logger: logging.Logger = logging.getLogger(__name__)

UNWRAPPED_WIDTH: Final = 10_000
"""Columns where no terminal is: nothing is cut or wrapped that a script may read."""
ROWS_SHOWN: Final = 10
"""Rejected rows that people are shown."""
NUMBERS: Final = frozenset({"retries", "size", "count", "messages", "attempts", "bytes", "line"})

#: How a check is shown that found all right, or a fault, or could not be made: mark and style.
MARKS: Final[Mapping[bool | None, tuple[str, str]]] = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}


#: The key of a click context's `meta` that says whether lines for people are records of a JSON log instead.
AS_LOG: Final = "delayline.as_log"


class Screen:
    """A command's output on stdout; with `as_json` only `document` prints."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console: Console = _console(width=None if sys.stdout.isatty() else UNWRAPPED_WIDTH, quiet=as_json)

    @property
    def animated(self) -> bool:
        """Whether progress may move on this screen."""
        return self.console.is_terminal and not self.as_json

    def progress(self) -> Progress:
        """Return a progress bar, which shows only where it may move and is gone when it is done."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.animated,
        )

    def echo(self, text: str, style: str | None = None) -> None:
        """Print a line for people."""
        if _logged(logging.INFO, text):
            return
        self.console.print(text, style=style, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table for people. On a narrow terminal its lines run over whole: ids stay in a piece."""
        if self.as_json:
            return
        table = table_of(columns, rows, plain=not self.console.is_terminal)
        needed = self.console.measure(table, options=self.console.options.update(width=UNWRAPPED_WIDTH)).maximum
        _console(width=max(needed, self.console.width)).print(table, crop=False)

    def document(self, document: Mapping[str, object]) -> None:
        """Print the JSON document for machines."""
        if self.as_json:
            click.echo(json.dumps(document, ensure_ascii=False, default=str))

    @staticmethod
    def print_error(text: str, kind: str) -> None:
        """Print the JSON document of an error on stdout."""
        click.echo(json.dumps({"error": {"type": kind, "text": text}}, ensure_ascii=False))

    @classmethod
    def fail(cls, text: str, kind: str, *, as_json: bool) -> None:
        """Print an error: a red line on stderr, and a JSON document for machines."""
        if as_json:
            cls.print_error(text, kind)
        cls.complain(text)

    @staticmethod
    def show_trace(trace: str) -> None:
        """Print a stack trace on stderr, as it is."""
        if not _logged(logging.ERROR, trace):
            click.echo(trace, err=True, nl=False)

    @staticmethod
    def complain(text: str) -> None:
        """Print a red line on stderr."""
        if _logged(logging.ERROR, text):
            return
        _print_on_stderr(f"error: {text}", "bold red")

    @staticmethod
    def warn(text: str) -> None:
        """Print a yellow line on stderr."""
        if _logged(logging.WARNING, text):
            return
        _print_on_stderr(f"warning: {text}", "yellow")


def _logged(level: int, text: str) -> bool:
    """Log the line if the command's lines are a JSON log; return whether they are."""
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(AS_LOG):
        return False
    emit(logger, level, Event.COMMAND, "%s", text)
    return True


def _print_on_stderr(text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(Text(" ".join(text.split()), style=style), soft_wrap=True)


def _console(*, width: int | None, quiet: bool = False) -> Console:
    return Console(markup=False, highlight=False, emoji=False, quiet=quiet, width=width)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]], *, plain: bool) -> Table:
    """Return a table; numbers to the right, so that they line up."""
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def bar(count: int, largest: int, width: int = 24) -> str:
    """Return a bar of blocks, `width` long for the largest count and never empty for a count above zero."""
    return "█" * max(1 if count else 0, round(width * count / largest)) if largest else ""
