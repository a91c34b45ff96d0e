"""Turns headers, bodies and stack traces, which anyone may have sent, into bounded text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Literal

from delayline.dashboard.model import Body, HeaderRow, MessageDetails
from delayline.failure_groups import headers_of, message_type

if TYPE_CHECKING:
    from datetime import datetime

    from delayline.message import Message

Form = Literal["json", "text", "hex"]
BODY_FORMS: Final[tuple[Form, ...]] = ("json", "text", "hex")
#: Bytes of a body that are shown.
BODY_SHOWN: Final = 65_536
#: Bytes of a binary body that are shown, at 16 a line.
HEX_SHOWN: Final = 4_096
HEX_LINE: Final = 16
#: Characters of a header's value, and headers of a message, that are shown.
VALUE_SHOWN: Final = 16_384
HEADERS_SHOWN: Final = 200
#: Characters of texts in lists.
TEXT_SHOWN: Final = 300


def header_rows(message: Message) -> tuple[list[HeaderRow], str | None]:
    """Return the headers to show, cut where they are long; damaged headers as they are stored."""
    headers, damaged = headers_of(message)
    if damaged is not None:
        headers = {"(as stored)": message.encoded_headers[: 4 * VALUE_SHOWN].decode("utf-8", "replace")}
    rows = [
        HeaderRow(name[:TEXT_SHOWN], value[:VALUE_SHOWN], len(value) > VALUE_SHOWN)
        for name, value in list(headers.items())[:HEADERS_SHOWN]
    ]
    if len(headers) > HEADERS_SHOWN:
        rows.append(HeaderRow("...", f"{len(headers) - HEADERS_SHOWN} more headers", cut=True))
    return rows, damaged


def body_of(body: bytes, size: int, form: Form | None = None) -> Body:
    """Return a body to show: indented JSON, text or a hex dump.

    Args:
        body: The body, or its beginning.
        size: Bytes of the whole body.
        form: The form to show it in, if it has that; by default the most readable.
    """
    if not size:
        return Body(0, "empty", "", cut=False)
    shown = body[:BODY_SHOWN]
    cut = len(shown) < size
    decoded = None if form == "hex" else _text_of(shown, cut=cut)
    if decoded is None:
        return Body(size, "binary", _hex(shown[:HEX_SHOWN]), cut=min(len(shown), HEX_SHOWN) < size)
    if form != "text" and not cut and decoded.lstrip()[:1] in ("{", "["):
        try:
            pretty = json.dumps(json.loads(decoded), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pretty = None
        if pretty is not None and "\ud800" not in pretty:
            pretty = pretty.encode("utf-8", "backslashreplace").decode()
            return Body(size, "json", pretty[: 4 * BODY_SHOWN], cut=len(pretty) > 4 * BODY_SHOWN)
    return Body(size, "text", decoded, cut=cut)


def one_line(text: str) -> str:
    """Return the beginning of a text as a line."""
    return " ".join(text[: 4 * TEXT_SHOWN].split())[:TEXT_SHOWN]


def _text_of(body: bytes, *, cut: bool) -> str | None:
    """Return the body as text, None if it is none; a character that was cut is left out."""
    try:
        decoded = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not cut or error.start < len(body) - 3:
            return None
        decoded = body[: error.start].decode("utf-8-sig")
    control = sum(1 for character in decoded[:4096] if ord(character) < 32 and character not in "\t\r\n\f")
    return decoded if control == 0 else None


def _hex(body: bytes) -> str:
    lines = []
    for first in range(0, len(body), HEX_LINE):
        part = body[first : first + HEX_LINE]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{first:08x}  {part.hex(' '):<47}  {shown}")
    return "\n".join(lines)


def details(
    message: Message, destination: str, due: datetime | None, retries: int, size: int, form: Form | None = None
) -> MessageDetails:
    """Return a message with headers and body, as far as they are shown."""
    rows, damaged = header_rows(message)
    kind = message_type(headers_of(message)[0])
    return MessageDetails(
        message.id, destination, due, retries, rows, damaged, body_of(message.body, size, form), message_type=kind
    )
