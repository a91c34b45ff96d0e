"""The columns of a stored message, declared once, in `StoredRow`.

Every list of them is made from it: the tables, statements, staging areas and COPY of SQL, the schemas of Arrow, Parquet
and Spark, Azure's rows, the journal. A new column is a field of `DelayedMessage` and one of `StoredRow`, which must be
nullable, and how they become each other in `StoredRow.of` and `message_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, get_type_hints

from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH, DelayedMessage, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime


class ColumnKind(Enum):
    """The kind of value that a column keeps; each back end has a type for it."""

    NAME = auto()
    """A text of limited length, equal to another one only when it is the same, character for character."""
    INSTANT = auto()
    """An instant with microseconds."""
    HEADERS = auto()
    """Headers: bytes of JSON, in Arrow the text."""
    BYTES = auto()
    """Bytes of any length."""
    COUNT = auto()
    """A whole number of 32 bits."""


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A column of the table that NServiceBus has published for SQL Server."""

    position: int
    name: str = ""
    """Its name there; empty where that is its `capitalised` name."""
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of a stored message."""

    kind: ColumnKind
    length: int = 0
    """The most characters of a name."""
    nullable: bool = False
    in_bulk: bool = True
    """Whether jobs read and write it; others are 0 in the rows that a job writes."""
    journaled: bool = False
    azure: str | None = None
    """Its property in Azure's rows, by default its `capitalised` name; empty where the row's key has it."""
    published: PublishedColumn | None = None
    name: str = ""
    """Its field of `StoredRow`, and its name in SQL, Arrow and Spark."""

    @property
    def capitalised(self) -> str:
        """Its name as .NET writes names."""
        return self.name.title().replace("_", "")

    @property
    def published_name(self) -> str:
        """Its name in the document's table for SQL Server; our own have names like those there."""
        return (self.published and self.published.name) or self.capitalised

    @property
    def is_content(self) -> bool:
        """Whether its values may be large, and count for the size of a message."""
        return self.kind in {ColumnKind.HEADERS, ColumnKind.BYTES}


class StoredRow(NamedTuple):
    """A stored message as the values of its columns, in the types of the back end that keeps it."""

    id: Annotated[
        str,
        StoredColumn(
            ColumnKind.NAME,
            MAXIMUM_ID_LENGTH,
            journaled=True,
            azure="MessageId",
            published=PublishedColumn(0, nullable=False),
        ),
    ]
    destination: Annotated[
        str,
        StoredColumn(ColumnKind.NAME, MAXIMUM_DESTINATION_LENGTH, journaled=True, published=PublishedColumn(1)),
    ]
    due: Annotated[
        Any, StoredColumn(ColumnKind.INSTANT, journaled=True, azure="", published=PublishedColumn(3, "Time"))
    ]
    headers: Annotated[bytes, StoredColumn(ColumnKind.HEADERS, published=PublishedColumn(4, nullable=False))]
    body: Annotated[bytes | None, StoredColumn(ColumnKind.BYTES, published=PublishedColumn(2, "State"))]
    retry_count: Annotated[
        int,
        StoredColumn(
            ColumnKind.COUNT,
            in_bulk=False,
            azure="NumberOfRetries",
            published=PublishedColumn(5, nullable=False),
        ),
    ] = 0

    @classmethod
    def of(
        cls, message: DelayedMessage, kept_instant: Callable[[datetime], Any], kept_headers: Callable[[Message], bytes]
    ) -> Self:
        """Return the row of a message.

        Args:
            message: The message.
            kept_instant: Returns the value that keeps an instant.
            kept_headers: Returns the value that keeps a message's headers.
        """
        content, due = message.message, kept_instant(message.due)
        # In the order of the fields above: by their names it takes twice as long.
        return cls(content.id, message.destination, due, kept_headers(content), content.body, message.number_of_retries)

    @classmethod
    def each(cls, columns: Mapping[str, Iterable[Any]]) -> Iterator[Self]:
        """Return the rows of columns; those that are not given have their defaults."""
        return map(
            cls, *(columns[name] if name in columns else repeat(cls._field_defaults[name]) for name in cls._fields)
        )

    @property
    def size(self) -> int:
        """How many bytes its headers and its body have."""
        return len(self.headers) + len(self.body or b"")


def message_of(row: Sequence[Any], instant: Callable[[Any], datetime]) -> DelayedMessage:
    """Return the message of a `StoredRow`, or of its values in the same order. instant: returns what a value keeps."""
    message_id, destination, due, headers, body, retry_count = row
    content = Message.from_encoded(message_id, headers, body or b"")
    return DelayedMessage(content, destination or "", instant(due), retry_count)


def _declared() -> Iterator[StoredColumn]:
    for name, declared in get_type_hints(StoredRow, include_extras=True).items():
        yield replace(declared.__metadata__[0], name=name)


STORED_COLUMNS: Final = tuple(_declared())
#: The columns that jobs read and write, and their values of a row.
BULK_COLUMNS: Final = tuple(column for column in STORED_COLUMNS if column.in_bulk)
BULK_NAMES: Final = tuple(column.name for column in BULK_COLUMNS)
bulk_values: Final[Callable[[StoredRow], tuple[Any, ...]]] = attrgetter(*BULK_NAMES)
#: The columns that a journal's entries have of a message.
JOURNALED_COLUMNS: Final = tuple(column for column in STORED_COLUMNS if column.journaled)
JOURNALED_NAMES: Final = tuple(column.name for column in JOURNALED_COLUMNS)
