"""The file that RavenDB's smuggler writes, read piece by piece: nothing of it is in memory but one document.

It is one JSON object, gzipped or not, whose member `Docs` has the documents. From version 4 on the contents of
attachments lie between them, as raw bytes behind an object with their number.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GZIP: Final = b"\x1f\x8b"
CHUNK: Final = 1 << 20
DOCUMENTS: Final = "Docs"
#: The most bytes of a document; RavenDB itself accepts far less.
LONGEST: Final = 1 << 30
#: A string, a string that is cut off, or a bracket.
TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|"|[{}\[\]]', re.DOTALL)
MEANING: Final = re.compile(rb"[^ \t\r\n,:]")
MARK: Final = b"\xef\xbb\xbf"
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
        text = str(error) or type(error).__name__
        raise BackendUnusable(f"{path} is not a complete RavenDB export: {text}") from error
    except OSError as error:
        raise BackendUnusable(f"cannot read {path}: {error.strerror or error}") from error


class _Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Reader:
    """Reads one value after the other."""

    def __init__(self, file: _Bytes) -> None:
        self._file = file
        self._buffer = file.read(len(MARK)).removeprefix(MARK)
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
        while (found := MEANING.search(self._buffer, self._at)) is None:
            self._at = len(self._buffer)
            self._more()
        self._at = found.start()
        return found[0]

    def _expect(self, byte: bytes) -> None:
        found = self._peek()
        if found != byte:
            raise ValueError(f"{found!r} where {byte!r} should be")
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
            if len(self._buffer) - self._at > LONGEST:
                raise ValueError(f"a value of more than {LONGEST} bytes")
            self._more()

    def _end_of_nested(self) -> int | None:
        depth = 0
        for token in TOKEN.finditer(self._buffer, self._at):
            found = token[0]
            if found == b'"':
                return None
            depth += OPENS.get(found, 0)
            if depth == 0:
                return token.end()
        return None

    def _end_of_scalar(self) -> int | None:
        found = SCALAR.match(self._buffer, self._at)
        return found.end() if found else None

    def _skip(self, size: int) -> None:
        while len(self._buffer) - self._at < size:
            size -= len(self._buffer) - self._at
            self._at = len(self._buffer)
            self._more()
        self._at += size

    def _more(self) -> None:
        """Read on. Raises EOFError at the end, since the document is incomplete."""
        chunk = self._file.read(max(CHUNK, len(self._buffer) - self._at))
        if not chunk:
            raise EOFError("it ends too early")
        self._buffer = self._buffer[self._at :] + chunk
        self._at = 0
