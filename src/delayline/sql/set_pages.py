"""Pages of a set of messages, in the order of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from sqlalchemy import and_, bindparam, func, or_, true

from delayline.actions import SetPreview
from delayline.filters import body_pattern_of, pattern_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement, Table

    from delayline.filters import MessageFilter, TextPattern
    from delayline.sql.dialect import Dialect

#: Ids that a preview shows.
EXAMPLES: Final = 5


class NumberedRow(Protocol):
    """A message of a set."""

    @property
    def number(self) -> int:
        """Its number in the order of the set."""
        ...

    @property
    def id(self) -> str:
        """Its id."""
        ...


Row = TypeVar("Row", bound=NumberedRow)


class SetPage(NamedTuple, Generic[Row]):
    """The messages of a page that match, the last number that was looked at, and how many were."""

    rows: list[Row]
    end: int
    looked_at: int


async def preview_of_pages(
    read: Callable[[int], Awaitable[SetPage[Row]]],
    bound: int,
    at: datetime,
    counted: Callable[[int], None] | None,
) -> SetPreview:
    """Return the preview of a set whose messages are read page by page.

    Args:
        read: Returns the page behind a number.
        bound: The last number of the set.
        at: The present time.
        counted: Called after each page with how many messages were looked through.
    """
    number, looked_at, position = 0, 0, 0
    examples: list[str] = []
    while position < bound:
        page = await read(position)
        number, looked_at, position = number + len(page.rows), looked_at + page.looked_at, page.end
        examples += [row.id for row in page.rows[: EXAMPLES - len(examples)]]
        if counted is not None:
            counted(looked_at)
    return SetPreview(number, at, bound, looked_at, examples=examples)


def must_read(wanted: MessageFilter) -> bool:
    """Return whether the database cannot tell which messages match: their headers or texts have to be read."""
    patterns = [pattern_of(text) for text in (wanted.message_id, wanted.destination) if text is not None]
    checks_content = wanted.checks_headers or wanted.body is not None
    return checks_content or any(each.exact is None and not each.is_prefix for each in patterns)


def waiting_conditions(table: Table, dialect: Dialect, wanted: MessageFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter on a store's messages, as far as the database can check them.

    Of patterns with stars how they begin, of headers and bodies parts that are in all that match.
    """
    columns, to_due = table.c, dialect.values.to_due
    conditions = content_conditions(table, dialect, wanted)
    conditions += id_conditions(columns.id, wanted)
    if wanted.destination is not None:
        conditions += fitting(dialect.words.exact(columns.destination), pattern_of(wanted.destination))
    if wanted.due_from is not None:
        conditions.append(columns.due >= to_due(wanted.due_from))
    if wanted.due_before is not None:
        conditions.append(columns.due < to_due(wanted.due_before))
    return conditions


def content_conditions(table: Table, dialect: Dialect, wanted: MessageFilter) -> list[ColumnElement[bool]]:
    """Return conditions on headers and bodies that all messages fulfil that match, and few others."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.checks_headers:
        conditions += [_containing(table.c.headers, dialect, [needle]) for needle in wanted.header_needles]
    if wanted.body is not None:
        forms = body_pattern_of(wanted.body).forms
        conditions.append(or_(*(_containing(table.c.body, dialect, form) for form in forms)))
    return conditions


def _containing(column: ColumnElement[bytes], dialect: Dialect, parts: Sequence[bytes]) -> ColumnElement[bool]:
    found = [dialect.values.containing(column, bindparam(None, part, type_=column.type)) for part in parts]
    return and_(true(), *(each for each in found if each is not None))


def id_conditions(column: ColumnElement[str], wanted: MessageFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter on ids, as far as the database can check them."""
    if wanted.copies and wanted.ids:
        return [column.in_(wanted.ids)]
    return [] if wanted.message_id is None else fitting(column, pattern_of(wanted.message_id))


def fitting(column: ColumnElement[str], pattern: TextPattern) -> list[ColumnElement[bool]]:
    """Return the conditions that a column fits a pattern, or of a pattern with stars within, begins as it does."""
    if pattern.exact is not None:
        return [column == pattern.exact]
    prefix = pattern.prefix
    return [column >= prefix, func.substr(column, 1, len(prefix)) == prefix] if prefix else []
