"""What people write into forms: times, filters, the headers of an edited message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from delayline.actions import OperatorAction
from delayline.dashboard.model import EditableMessage
from delayline.errors import CorruptHeaders, InvalidDueTime, InvalidMessage
from delayline.failures import FAILURE_HEADERS
from delayline.filters import MessageFilter, literal
from delayline.message import Headers
from delayline.readable import parse_delay, parse_instant, parse_shift

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from delayline.message import Message

#: Characters of the headers, and of the body, of a message that a form is shown for.
LARGEST_FIELD: Final = 65_536
BYTE_ORDER_MARK: Final = "\ufeff"
BOM, CRLF = "bom", "crlf"
#: What a form's field does not give back as it was: browsers send every end of a line as CR LF, and no NUL.
UNFIT: Final = re.compile("[\0\r]")


def instant_of(written: str, now: datetime) -> datetime:
    """Return the instant written as a time, `2026-05-01T09:00Z`, or as a delay from now, `2h` or `in 2h`.

    Raises:
        InvalidDueTime: It is neither.
    """
    written = written.strip().removeprefix("in ").strip()
    if not written:
        raise InvalidDueTime("no time is given: write 2h for two hours from now, or 2026-05-01T09:00Z")
    try:
        return now + parse_delay(written)
    except InvalidDueTime as no_delay:
        try:
            return parse_instant(written)
        except InvalidDueTime as no_instant:
            raise no_instant if written[:4].isdigit() else no_delay from None
    except OverflowError as error:
        raise InvalidDueTime(f"{written!r} from now lies beyond year 9999: use an earlier time") from error


def filter_of(fields: Mapping[str, str], now: datetime) -> MessageFilter:
    """Return the filter of a search's fields: texts as they are written, of a type and a header's value a part.

    Raises:
        InvalidDueTime: A due time cannot be read.
        ConfigurationError: The fields do not fit together.
    """
    start, end = (instant_of(fields[name], now) if fields[name] else None for name in ("from", "before"))
    return MessageFilter(
        message_id=literal(fields["id"]) or None,
        destination=literal(fields["destination"]) or None,
        message_type=_part(fields["type"]),
        header=fields["header"] or None,
        header_value=_part(fields["value"]),
        due_from=start,
        due_before=end,
    )


def _part(text: str) -> str | None:
    return f"*{literal(text)}*" if text else None


def change_of(form: Mapping[str, str], now: datetime) -> tuple[OperatorAction, datetime | None, timedelta | None]:
    """Return the action on pending messages, with the due time or the delay that it needs.

    Raises:
        InvalidDueTime: The due time or the delay cannot be read.
        InvalidMessage: No action was chosen.
    """
    due = form.get("due", "")
    match form.get("action"):
        case "cancel":
            return OperatorAction.CANCEL, None, None
        case "send-now":
            return OperatorAction.SEND_NOW, None, None
        case "reschedule":
            return OperatorAction.RESCHEDULE, instant_of(due, now), None
        case "postpone":
            return OperatorAction.RESCHEDULE, None, parse_shift(due)
    raise InvalidMessage("no action was chosen")


def whole(written: str, name: str, largest: int) -> int:
    """Return a whole number from 1 on. Raises InvalidMessage."""
    if not written.isascii() or not written.isdigit() or len(written) > 12 or not 1 <= int(written) <= largest:
        raise InvalidMessage(f"{name} must be a number from 1 to {largest:,}, not {written[:20]!r}")
    return int(written)


def editable(message: Message) -> EditableMessage | None:
    """Return a message as the fields of a form; None where the form would not give back every byte."""
    try:
        headers, body = dict(message.headers), message.body.decode()
    except (CorruptHeaders, UnicodeDecodeError):
        return None
    kept = {name: value for name, value in headers.items() if not name.startswith(FAILURE_HEADERS)}
    lines, marks = header_lines(kept), []
    if body.startswith(BYTE_ORDER_MARK):
        body = body.removeprefix(BYTE_ORDER_MARK)
        marks.append(BOM)
    if body.count("\r\n") == body.count("\n") > 0:
        body = body.replace("\r\n", "\n")
        marks.append(CRLF)
    form = EditableMessage(headers.get(Headers.FAILED_QUEUE, ""), lines, body, " ".join(marks))
    try:
        fits = headers_of(lines) == kept and body_of(body, form.marks) == message.body
        f"{lines}{message.id}".encode()
    except (InvalidMessage, UnicodeEncodeError):
        return None
    one_line = f"{form.to}{message.id}"
    fits = fits and form.to == form.to.strip() and "\n" not in one_line
    fields = (one_line, lines, body)
    return form if fits and all(len(field) <= LARGEST_FIELD and not UNFIT.search(field) for field in fields) else None


def body_of(text: str, marks: str) -> bytes:
    """Return the body of a form's field, with the marks of `editable`."""
    plain = text.replace("\r\n", "\n")
    ended = plain.replace("\n", "\r\n") if CRLF in marks.split() else plain
    return f"{BYTE_ORDER_MARK if BOM in marks.split() else ''}{ended}".encode()


def header_lines(headers: Mapping[str, str]) -> str:
    """Return headers as lines that `headers_of` reads."""
    return "\n".join(f"{name}: {_escaped(value)}" for name, value in headers.items())


def headers_of(text: str) -> dict[str, str]:
    """Return the headers of lines `name: value`. Raises InvalidMessage with the line."""
    headers: dict[str, str] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(": ") if ": " in line else line.partition(":")
        if not colon or not name.strip():
            raise InvalidMessage(f"line {number} of the headers is not `name: value`")
        if name.strip() in headers:
            raise InvalidMessage(f"line {number} of the headers repeats {name.strip()[:100]!r}")
        headers[name.strip()] = _plain(value)
    return headers


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _plain(value: str) -> str:
    parts = value.split("\\\\")
    return "\\".join(part.replace("\\r", "\r").replace("\\n", "\n") for part in parts)
