"""Headers in the XML form that NServiceBus uses in MSMQ messages and in its SQL Server store.

Pure functions. Input is untrusted: a document type is refused, so entities cannot expand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from xml.parsers.expat import ExpatError, ParserCreate

from delayline.errors import CorruptHeaders

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = "ArrayOfHeaderInfo"
ITEM: Final = "HeaderInfo"
END: Final = f"</{ROOT}>".encode()
START: Final = (
    f'<?xml version="1.0"?><{ROOT} xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
    'xmlns:xsd="http://www.w3.org/2001/XMLSchema">'
)
#: Every reader expects this entry. An empty value means that the header was not set.
CORRELATION_ID: Final = "CorrId"

#: Characters that XML 1.0 cannot hold, and the carriage return, which a reader would turn into a line feed.
_INVALID: Final = "\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff"
_TO_ESCAPE: Final = re.compile(f"[&<>\r{_INVALID}]")
_NAMED: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
#: Characters that expat would refuse are escaped with this private-use character while it reads, and so is the
#: character.
_MARK: Final = "\uf8ff"
_TO_SPELL: Final = re.compile(f"&#(?:x([0-9a-fA-F]{{1,8}})|([0-9]{{1,10}}));|[{_MARK}{_INVALID}]")
_REFUSED: Final = re.compile(f"[{_MARK}{_INVALID}]")
_SPELLED: Final = re.compile(f"{_MARK}([0-9a-f]+);")
_HIGHEST: Final = 0x10FFFF


def to_xml(headers: Mapping[str, str]) -> bytes:
    """Return the XML form of headers."""
    items = [f"<{ITEM}><Key>{_text(key)}</Key><Value>{_text(value)}</Value></{ITEM}>" for key, value in headers.items()]
    if CORRELATION_ID not in headers:
        items.append(f"<{ITEM}><Key>{CORRELATION_ID}</Key></{ITEM}>")
    return f"{START}{''.join(items)}</{ROOT}>".encode()


def from_xml(encoded: bytes, message_id: str) -> dict[str, str]:
    """Return headers from their XML form; raises CorruptHeaders. Bytes after the last end of the root are ignored."""
    end = encoded.rfind(END)
    reader = _Reader()
    try:
        decoded = encoded[: end + len(END) if end >= 0 else None].decode("utf-8-sig", "surrogatepass")
        reader.read(_TO_SPELL.sub(_spell, decoded))
    except (ExpatError, ValueError) as error:
        raise CorruptHeaders(f"message {message_id!r} has corrupted headers: {error}") from error
    return reader.headers


def _text(text: str) -> str:
    return _TO_ESCAPE.sub(lambda match: _NAMED.get(match[0]) or f"&#x{ord(match[0]):X};", text)


def _spell(match: re.Match[str]) -> str:
    hexadecimal, decimal = match.groups()
    if hexadecimal is None and decimal is None:
        return f"{_MARK}{ord(match[0]):x};"
    code = int(hexadecimal, 16) if hexadecimal else int(decimal)
    if code > _HIGHEST or not _REFUSED.match(chr(code)):
        return match[0]  # expat parses it, or raises
    return f"{_MARK}{code:x};"


class _Reader:
    """Reads a document: a root, items, keys and values; whatever else is in there is passed over."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self._path: list[str] = []
        self._fields: dict[str, str] = {}
        self._texts: list[str] | None = None

    def read(self, text: str) -> None:
        parser = ParserCreate(namespace_separator=" ")
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        parser.StartDoctypeDeclHandler = _refuse_document_type
        parser.Parse(text, True)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(name)
        depth = len(self._path)
        if depth == 1 and name != ROOT:
            raise ValueError(f"the root is {name!r}, not {ROOT!r}")
        if depth == 2:
            self._fields = {}
        null = attributes.get("http://www.w3.org/2001/XMLSchema-instance nil") in {"true", "1"}
        self._texts = [] if depth == 3 and self._path[1] == ITEM and not null else None

    def _data(self, text: str) -> None:
        if self._texts is not None and len(self._path) == 3:
            self._texts.append(text)

    def _end(self, name: str) -> None:
        depth = len(self._path)
        if depth == 3 and self._texts is not None:
            value = "".join(self._texts)
            self._fields[name] = _SPELLED.sub(lambda match: chr(int(match[1], 16)), value)
            self._texts = None
        elif depth == 2 and self._path[1] == ITEM:
            self._add()
        self._path.pop()

    def _add(self) -> None:
        key, value = self._fields.get("Key"), self._fields.get("Value")
        if key is None or (key == CORRELATION_ID and value is None):
            return
        if key in self.headers:
            raise ValueError(f"the header {key!r} is there twice")
        self.headers[key] = value or ""


def _refuse_document_type(*_: object) -> None:
    raise ValueError("a document type, which headers do not have")
