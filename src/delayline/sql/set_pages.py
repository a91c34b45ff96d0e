"""Pages of a set of messages, in the order of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from delayline.actions import SetPreview

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

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
