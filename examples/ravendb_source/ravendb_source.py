"""Timeouts of RavenDB persistence, from export files of its databases, versions 3 and later.

See https://docs.particular.net/persistence/ravendb/.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import pickle
import re
import reprlib
import zlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import pyarrow as pa

from delayline.bulk.writer import blocking
from delayline.errors import BackendUnusable
from delayline.migration.collected import ROWS_A_PAGE, CollectedMessage, Selection, key_of
from delayline.migration.sources.exported import ExportedFiles
from delayline.migration.tally import Bounds, Tally
from delayline.spark.errors import translated_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from delayline.migration.journal import HeldPartition


OWNER: Final = "OwningTimeoutManager"
FIELDS: Final = frozenset({OWNER, "Destination", "Time"})
#: The prefixes with which .NET's migration tool marks timeouts that it is moving, and has moved.
HIDDEN: Final = "__hidden__"
MIGRATED: Final = "__migrated__"
PICKLED: Final = "pickled BINARY"
PICKLED_SCHEMA: Final = pa.schema([("pickled", pa.binary())])
NO_ENDPOINT: Final = "(no endpoint)"
NO_OWNER: Final = "it names no endpoint: it moves with the one that --endpoint names"
IN_THE_HAND: Final = "another tool was moving it when the file was written: abort that, and export again"


class RavenDb(ExportedFiles):
    """Timeouts in export files; `*` and `?` in the path select several. Each Spark task reads a file.

    Files are not changed: the journal records moved timeouts, and no run moves them again. Timeouts that name no
    endpoint belong to the named endpoint, as in RavenDB's own endpoints; when all endpoints are moved, they stay.
    """

    kind: ClassVar[str] = "ravendb"
    written_by: ClassVar[str] = "RavenDB"

    async def drain(self, which: Selection, spark: SparkSession) -> None:
        """Have tasks copy the timeouts into the table beside the journal."""
        moved = await self.database.read(self.moved)
        _on_each(self.files, spark, Copy(self, which, moved).of)

    def looked_at(self, which: Selection, bounds: Bounds, spark: SparkSession) -> Tally:
        """Read the files in tasks, which sum up their contents."""
        moved = blocking(self.database.look(self.moved))
        total = Tally()
        for tally in _on_each(self.files, spark, Copy(self, which, moved, bounds).of):
            total.merge(tally)
        return total


@dataclass(frozen=True)
class Copy:
    """The work of tasks on a file: copy the selected timeouts, or, with bounds, count them. Pickled to tasks."""

    source: RavenDb
    which: Selection
    moved: Sequence[tuple[str, HeldPartition]]
    bounds: Bounds | None = None

    def of(self, path: str) -> Tally:
        """Copy, or count, a file's."""
        return blocking(self._of(Path(path)))

    async def _of(self, path: Path) -> Tally:
        tally, database = Tally(), self.source.database
        if self.bounds is not None:
            for rows in self._chunks(path):
                new = await database.look(partial(self.source.new, rows=rows, moved=self.moved))
                tally.add(new, self.which, self.bounds)
            return tally
        await database.open()
        try:
            for rows in self._chunks(path):
                some = [row for row in rows if self.which.includes(row.due)]
                new = await database.read(partial(self.source.new, rows=some, moved=self.moved))
                await database.write(partial(self.source.keep, rows=new))
        finally:
            await database.close()
        return tally

    def _chunks(self, path: Path) -> Iterator[list[CollectedMessage]]:
        piece: list[CollectedMessage] = []
        for document in documents(path):
            if not document.keys() >= FIELDS:
                continue
            message = self._asked_for(_collected(document))
            if message is not None:
                piece.append(message)
            if len(piece) == ROWS_A_PAGE:
                yield piece
                piece = []
        yield piece

    def _asked_for(self, message: CollectedMessage) -> CollectedMessage | None:
        named = self.which.endpoints
        if message.endpoint:
            return message if not message.endpoint.startswith(MIGRATED) and self.which.names(message.endpoint) else None
        if named is None:
            return None if self.bounds is None else replace(message, endpoint=NO_ENDPOINT, why=NO_OWNER)
        return replace(message, endpoint=named[0]) if len(named) == 1 else None


def _on_each(files: Sequence[str], spark: SparkSession, work: Callable[[str], Tally]) -> list[Tally]:
    """Run the work on each file, in a task per file."""

    def through(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for some in numbers:
            for number in some.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist([{"pickled": pickle.dumps(work(files[int(number)]))}], PICKLED_SCHEMA)

    with translated_errors():
        tallies = spark.range(0, len(files), 1, len(files)).mapInArrow(through, PICKLED).toArrow()
    return [pickle.loads(pickled) for pickled in tallies.column(0).to_pylist()]  # noqa: S301 - our own tasks'


def _collected(document: Mapping[str, Any]) -> CollectedMessage:
    metadata = document.get("@metadata")
    name = _name(metadata.get("@id") if isinstance(metadata, dict) else None) or _name(document.get("Id"))
    owner = _name(document.get(OWNER))
    why = None
    if owner.startswith(HIDDEN):
        owner, why = owner.removeprefix(HIDDEN), IN_THE_HAND
    headers = document.get("Headers")
    if isinstance(headers, dict):
        headers = {key: value for key, value in headers.items() if value is not None}
    body = None
    try:
        body = base64.b64decode(document.get("State") or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        why = why or "its State is not base64"
    due = _due(document.get("Time"))
    if due is None:
        why = why or f"its Time {reprlib.repr(document.get('Time'))} is none"
    encoded = None
    try:
        encoded = None if not headers else json.dumps(headers, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        why = why or f"its Headers cannot be kept: {error}"
    return CollectedMessage(
        key_of(name), owner, name, _destination(document.get("Destination")), due, encoded, body, why
    )


def _name(value: Any) -> str:  # noqa: ANN401 - JSON
    return str(value) if isinstance(value, str | int) else ""


def _destination(value: Any) -> str | None:  # noqa: ANN401 - JSON
    """Return the destination, as version 1 of the persistence wrote it too."""
    if isinstance(value, dict):
        queue, machine = _name(value.get("Queue")), _name(value.get("Machine"))
        return f"{queue}@{machine}" if machine else queue or None
    return _name(value) or None


def _due(value: Any) -> datetime | None:  # noqa: ANN401 - JSON
    """Return the time, in UTC, rounded up to a microsecond: .NET writes a tenth of it."""
    if not isinstance(value, str):
        return None
    whole, dot, rest = value.partition(".")
    fraction = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        due = datetime.fromisoformat(f"{whole}{dot}{fraction[:6].ljust(6, '0') if dot else ''}{rest[len(fraction) :]}")
        due = due.replace(tzinfo=UTC) if due.tzinfo is None else due.astimezone(UTC)
        return due + timedelta(microseconds=1) if fraction[6:].strip("0") else due
    except (ValueError, OverflowError):
        return None


GZIP: Final = b"\x1f\x8b"
CHUNK_BYTES: Final = 1 << 20
DOCUMENTS: Final = "Docs"
#: The most bytes of a document; RavenDB itself accepts far less.
LARGEST_DOCUMENT: Final = 1 << 30
#: A string, a string that is cut off, or a bracket.
JSON_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|"|[{}\[\]]', re.DOTALL)
MEANING: Final = re.compile(rb"[^ \t\r\n,:]")
UTF8_MARK: Final = b"\xef\xbb\xbf"
OPENS: Final = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
SCALAR: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[^"\s,:\[\]{}]+(?=[\s,:\[\]{}])', re.DOTALL)


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of an export, in their order. Raises BackendUnusable for a file that is none, or cut off."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == GZIP
            raw.seek(0)
            with gzip.open(raw) if gzipped else raw as plain:
                yield from _Reader(plain).documents()
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        cause = str(error) or type(error).__name__
        raise BackendUnusable(f"{path} is not a complete RavenDB export: {cause}") from error
    except OSError as error:
        raise BackendUnusable(f"cannot read {path}: {error.strerror or error}") from error


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Reader:
    """Reads value after value."""

    def __init__(self, file: _Bytes) -> None:
        self._file = file
        self._buffer = file.read(len(UTF8_MARK)).removeprefix(UTF8_MARK)
        self._at = 0

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yield the documents; the rest of the file is not read."""
        self._expect(b"{")
        while self._peek() != b"}":
            name = json.loads(self._value())
            if name == DOCUMENTS:
                self._expect(b"[")
                while self._peek() != b"]":
                    yield from self._document()
                return
            if self._peek() == b"[":
                self._expect(b"[")
                while self._peek() != b"]":
                    self._value()
                self._expect(b"]")
            else:
                self._value()
        raise ValueError(f"it has no {DOCUMENTS!r}")

    def _document(self) -> Iterator[dict[str, Any]]:
        value = json.loads(self._value())
        if not isinstance(value, dict):
            raise TypeError("one of its documents is not an object")
        metadata = value.get("@metadata")
        if isinstance(metadata, dict) and metadata.get("@export-type") == "Attachment":
            size = int(value["Size"])
            if size < 0:
                raise ValueError(f"an attachment of {size} bytes")
            self._skip(size)
        else:
            yield value

    def _peek(self) -> bytes:
        """Return the next byte that means something."""
        while (match := MEANING.search(self._buffer, self._at)) is None:
            self._at = len(self._buffer)
            self._more()
        self._at = match.start()
        return match[0]

    def _expect(self, byte: bytes) -> None:
        character = self._peek()
        if character != byte:
            raise ValueError(f"{character!r} where {byte!r} should be")
        self._at += 1

    def _value(self) -> bytes:
        """Return the bytes of the value that begins here."""
        first = self._peek()
        while True:
            end = self._end_of_nested() if first in OPENS else self._end_of_scalar()
            if end is not None:
                value = self._buffer[self._at : end]
                self._at = end
                return value
            if len(self._buffer) - self._at > LARGEST_DOCUMENT:
                raise ValueError(f"a value of more than {LARGEST_DOCUMENT} bytes")
            self._more()

    def _end_of_nested(self) -> int | None:
        depth = 0
        for token in JSON_TOKEN.finditer(self._buffer, self._at):
            character = token[0]
            if character == b'"':
                return None
            depth += OPENS.get(character, 0)
            if depth == 0:
                return token.end()
        return None

    def _end_of_scalar(self) -> int | None:
        match = SCALAR.match(self._buffer, self._at)
        return match.end() if match else None

    def _skip(self, size: int) -> None:
        while len(self._buffer) - self._at < size:
            size -= len(self._buffer) - self._at
            self._at = len(self._buffer)
            self._more()
        self._at += size

    def _more(self) -> None:
        """Read on. Raises EOFError at the end, since the document is incomplete."""
        chunk = self._file.read(max(CHUNK_BYTES, len(self._buffer) - self._at))
        if not chunk:
            raise EOFError("it ends too early")
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
