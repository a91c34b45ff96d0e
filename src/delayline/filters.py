"""Filters: which messages an action or a search means, as people write it, and as a message is checked against it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

from delayline.errors import ConfigurationError, CorruptHeaders, InvalidDueTime
from delayline.failure_groups import group_key
from delayline.message import UNUSABLE_IN_IDS, Headers, in_utc
from delayline.readable import DELAYS, INSTANTS, parse_instant, parse_shift

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delayline.failure_groups import Failure
    from delayline.message import Message

#: The conditions of a filter by the names that people write, and the fields of `MessageFilter` that have them.
CONDITIONS: Final[Mapping[str, str]] = {
    "id": "message_id",
    "id-prefix": "message_id",
    "destination": "destination",
    "type": "message_type",
    "header": "header",
    "correlation": "correlation",
    "conversation": "conversation",
    "body": "body",
    "due": "due",
    "exception": "exception",
    "group": "group",
}
LONGEST_FILTER: Final = 10_000
"""Characters of a written filter."""
HOW_TO_WRITE: Final = (
    "write name=value, several with commas between; * stands for any characters, \\, and \\* for a comma and a star of "
    "a value; the names are " + ", ".join(CONDITIONS)
)
DUE_FORMS: Final = (
    "due=<TIME for earlier than, due=>=TIME for not earlier than, due=TIME..TIME for from the first and before the "
    f"second; a TIME is a day as 2026-12-01 in UTC, {INSTANTS}, now, or a delay from now as {DELAYS}"
)
#: The fields of conditions on how a message failed, which are the same for all messages of a kind.
_OF_FAILURES: Final = frozenset({"destination", "message_type", "exception", "group"})
_PART: Final = re.compile(r"((?:[^,\\]|\\.?)*)(?:,|$)", re.DOTALL)
_PAIR: Final = re.compile(r"\\(.)", re.DOTALL)
_PIECE: Final = re.compile(r"\\([\\*])|(\*)|(.)", re.DOTALL)
_NAMESPACE: Final = re.compile(r"^.*[.+]", re.DOTALL)
#: What headers and bodies have as it is, however they were written: JSON and XML may escape any other character.
_NEVER_ESCAPED: Final = re.compile(r"[A-Za-z0-9_.-]{3,}", re.ASCII)
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class TextPattern:
    """A text, in which a star stands for any characters; a backslash before a star or a backslash means it as it is.

    Args:
        pattern: The pattern as it is written.
    """

    def __init__(self, pattern: str) -> None:
        pieces = [(escaped or plain, bool(star)) for escaped, star, plain in _PIECE.findall(pattern)]
        stars = [position for position, (_, star) in enumerate(pieces) if star]
        before = "".join(text for text, _ in pieces[: stars[0] if stars else None])
        self.exact: str | None = None if stars else before
        """The text, if there is no star in it."""
        self.prefix: str = before
        """How it begins, up to the first star."""
        self.is_prefix: bool = stars == [len(pieces) - 1]
        """Whether there is nothing behind the only star."""
        between = "".join("\n" if star else text for text, star in pieces)
        self.needle: bytes = max(_NEVER_ESCAPED.findall(between), key=len, default="").encode()
        """Bytes that are in every encoded text that it fits; empty where there are none of which that is sure."""
        self._regex = re.compile("".join(".*" if star else re.escape(text) for text, star in pieces), re.DOTALL)

    def matches(self, text: str) -> bool:
        """Return whether the whole text fits, with case."""
        return self.exact == text if self.exact is not None else self._regex.fullmatch(text) is not None


class BodyPattern:
    """A part of a body, in which a star stands for any bytes: in UTF-8, or as JSON escapes it.

    Args:
        pattern: The pattern as it is written.
    """

    def __init__(self, pattern: str) -> None:
        texts, part = [], ""
        for escaped, star, plain in _PIECE.findall(pattern):
            if star:
                texts.append(part)
                part = ""
            part += escaped or plain
        parts = [text for text in (*texts, part) if text]
        as_written = tuple(text.encode("utf-8", "surrogatepass") for text in parts)
        as_json = tuple(json.dumps(text)[1:-1].encode() for text in parts)
        self.forms: Sequence[tuple[bytes, ...]] = list(dict.fromkeys((as_written, as_json)))
        """The parts between the stars, in each form that they may have."""
        self.has_order: bool = len(parts) > 1
        """Whether a body that has all parts may have them in another order."""
        self._regexes = [re.compile(b".*".join(map(re.escape, form)), re.DOTALL) for form in self.forms]

    def matches(self, body: bytes) -> bool:
        """Return whether the body has the part, with case."""
        return any(regex.search(body) for regex in self._regexes)


@lru_cache(maxsize=1024)
def body_pattern_of(pattern: str) -> BodyPattern:
    """Return the pattern of a part of a body that is written so."""
    return BodyPattern(pattern)


@lru_cache(maxsize=1024)
def pattern_of(pattern: str) -> TextPattern:
    """Return the pattern that is written so."""
    return TextPattern(pattern)


def literal(text: str) -> str:
    """Return the pattern that only this text fits."""
    return text.replace("\\", "\\\\").replace("*", "\\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    r"""Which messages: those that fulfil all conditions that are given.

    Texts are compared whole and with case, but a body, of which a part is enough. In each but the name of a header, `*`
    stands for any characters, `\*` for a star. A filter without a condition means every message. A message whose
    headers are damaged fulfils no condition on a header.
    """

    message_id: str | None = None
    """The id."""
    destination: str | None = None
    """The queue it is for; of a failed message, the queue that it failed in."""
    message_type: str | None = None
    """An enclosed type of the message: its full name, or what is behind the last dot or plus of it."""
    header: str | None = None
    """The name of a header that it has."""
    header_value: str | None = None
    """The value of that header; of any header where no name is given."""
    correlation: str | None = None
    """Its correlation id."""
    conversation: str | None = None
    """The id of the conversation that it is part of."""
    body: str | None = None
    """A part of its body: in UTF-8, or as JSON escapes it."""
    due_from: datetime | None = None
    """Its earliest due time."""
    due_before: datetime | None = None
    """The time before which it is due."""
    exception: str | None = None
    """The type of the exception that a failed message has failed with, as a type of messages."""
    group: str | None = None
    """The key of the group that a failed message is in, as the dashboard's page of a group has it in its address."""
    copies: tuple[str, ...] | None = field(default=None, compare=False, repr=False)
    """Ids that a search takes for `message_id` too: those of copies of the message; no part of the filter's text."""

    def __post_init__(self) -> None:
        """Refuse conditions that mean nothing. Raises ConfigurationError."""
        for condition in fields(self):
            value = getattr(self, condition.name)
            if value == "":
                raise ConfigurationError(f"{condition.name} is empty, which would mean every message: leave it out")
            if isinstance(value, str) and UNUSABLE_IN_IDS.search(value):
                raise ConfigurationError(f"{condition.name} {_shown(value)} has a character that no message can have")
            if isinstance(value, datetime):
                object.__setattr__(self, condition.name, in_utc(value))
        if self.due_from is not None and self.due_before is not None and self.due_from >= self.due_before:
            raise ConfigurationError(
                f"no message is due from {self.due_from.isoformat()} on and before {self.due_before.isoformat()}: "
                "the second time must be later"
            )

    @classmethod
    def parse(cls, written: Iterable[str], now: datetime) -> Self:
        """Return the filter that people have written as `name=value,name=value`.

        Args:
            written: The texts; their conditions hold together.
            now: The present time, for due times such as `now` and `2h`.

        Raises:
            ConfigurationError: A condition is unknown, empty, given twice, or cannot be read.
        """
        given: dict[str, str] = {}
        conditions: dict[str, object] = {}
        for text in written:
            if len(text) > LONGEST_FILTER:
                raise ConfigurationError(f"a filter has at most {LONGEST_FILTER:,} characters, not {len(text):,}")
            for part in _parts(text):
                name, value = _condition(part)
                if name in given:
                    raise ConfigurationError(
                        f"{name} is given twice, as {_shown(given[name])} and {_shown(value)}: all conditions must "
                        "hold together, give one"
                    )
                given[name] = value
                added = _fields_of(name, value, now)
                if CONDITIONS[name] in conditions and CONDITIONS[name] in added:
                    raise ConfigurationError(
                        "id and id-prefix are both given: all conditions must hold together, give one"
                    )
                conditions |= added
        return cls(**conditions)  # type: ignore[arg-type] # by the names of the fields

    @property
    def names_nothing(self) -> bool:
        """Whether it has no condition, and so means every message."""
        return all(getattr(self, condition.name) is None for condition in fields(self))

    @property
    def checks_headers(self) -> bool:
        """Whether the headers of messages have to be read."""
        return self.group is not None or self._checks_decoded_headers

    @property
    def _checks_decoded_headers(self) -> bool:
        return any((self.header, *self._header_patterns))

    @property
    def _header_patterns(self) -> Sequence[str | None]:
        return self.message_type, self.header_value, self.correlation, self.conversation, self.exception

    @property
    def header_needles(self) -> Sequence[bytes]:
        """Bytes that the encoded headers of every message have that fulfils the conditions on headers."""
        needles = [pattern_of(pattern).needle for pattern in self._header_patterns if pattern is not None]
        if self.header is not None:
            needles.append(pattern_of(literal(self.header)).needle)
        return [needle for needle in needles if needle]

    @property
    def checks_due(self) -> bool:
        """Whether it has a condition on due times."""
        return self.due_from is not None or self.due_before is not None

    @property
    def asks_for_more_than_failure(self) -> bool:
        """Whether it has a condition that `fits_failure` does not check."""
        others = (condition.name for condition in fields(self) if condition.name not in _OF_FAILURES)
        return any(getattr(self, name) is not None for name in others)

    def check_of_failed(self) -> None:
        """Raise ConfigurationError where it asks for what failed messages do not have."""
        if self.checks_due:
            raise ConfigurationError("failed messages have no due time: leave due out, or act on pending messages")

    def fits_failure(self, failure: Failure) -> bool:
        """Return whether failed messages of this kind fulfil the conditions on group, exception, type and queue."""
        if self.group is not None and failure.key != self.group:
            return False
        return (
            _fits(self.destination, failure.queue)
            and (not failure.damaged or not any((self.message_type, self.exception)))
            and _names(self.message_type, failure.types)
            and _names(self.exception, failure.exception)
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """The only ids that fulfil the condition on it; empty where others do, too."""
        exact = None if self.message_id is None else pattern_of(self.message_id).exact
        return () if exact is None else (exact, *(self.copies or ()))

    def matches(self, message: Message, destination: str, due: datetime | None = None) -> bool:
        """Return whether a message fulfils all conditions.

        Args:
            message: The message.
            destination: The queue it is for, or that it failed in.
            due: Its due time; a message without one fulfils no condition on due times.
        """
        if not (_fits(self.message_id, message.id) or message.id in (self.copies or ())):
            return False
        if not _fits(self.destination, destination):
            return False
        if self.checks_due and due is None:
            return False
        if self.due_from is not None and due is not None and due < self.due_from:
            return False
        if self.due_before is not None and due is not None and due >= self.due_before:
            return False
        if self.checks_headers and not self.matches_headers(message):
            return False
        return self.body is None or body_pattern_of(self.body).matches(message.body)

    def matches_headers(self, message: Message) -> bool:
        """Return whether a message's headers fulfil the conditions on headers."""
        if self.group is not None and group_key(message) != self.group:
            return False
        if not self._checks_decoded_headers:
            return True
        try:
            headers = message.headers
        except CorruptHeaders:
            return False
        if not _names(self.message_type, headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")):
            return False
        if not _names(self.exception, headers.get(Headers.EXCEPTION_TYPE, "")):
            return False
        for pattern, name in (
            (self.correlation, Headers.CORRELATION_ID),
            (self.conversation, Headers.CONVERSATION_ID),
        ):
            if pattern is not None and (name not in headers or not _fits(pattern, headers[name])):
                return False
        if self.header is not None:
            value = headers.get(self.header)
            return value is not None and _fits(self.header_value, value)
        return self.header_value is None or any(_fits(self.header_value, value) for value in headers.values())

    def __str__(self) -> str:
        """Return the filter as `parse` reads it; empty for every message."""
        conditions = {
            "id": self.message_id,
            "destination": self.destination,
            "type": self.message_type,
            "header": None if self.header is None and self.header_value is None else self._written_header,
            "correlation": self.correlation,
            "conversation": self.conversation,
            "body": self.body,
            "due": self._written_due if self.checks_due else None,
            "exception": self.exception,
            "group": self.group,
        }
        return ",".join(f"{name}={_escape(value)}" for name, value in conditions.items() if value is not None)

    @property
    def _written_header(self) -> str:
        return (self.header or "") + ("" if self.header_value is None else f":{self.header_value}")

    @property
    def _written_due(self) -> str:
        start = "" if self.due_from is None else self.due_from.isoformat()
        return f"{start}..{'' if self.due_before is None else self.due_before.isoformat()}"


def checked_filter(where: object) -> MessageFilter:
    """Return the filter; raises ConfigurationError for anything else, such as a text."""
    if not isinstance(where, MessageFilter):
        raise ConfigurationError(
            f"which messages is a MessageFilter, not {type(where).__name__}: MessageFilter(destination=...), or "
            "MessageFilter.parse([text], now); MessageFilter() means every message"
        )
    return where


def _fits(pattern: str | None, text: str) -> bool:
    return pattern is None or pattern_of(pattern).matches(text)


def _names(pattern: str | None, types: str) -> bool:
    """Return whether any of the types, as .NET and headers list them, has the name, whole or without its namespace."""
    if pattern is None:
        return True
    wanted = pattern_of(pattern)
    for listed in types.split(";"):
        name = listed.partition(",")[0].strip()
        if name and (wanted.matches(name) or wanted.matches(_NAMESPACE.sub("", name))):
            return True
    return False


def _parts(text: str) -> list[str]:
    """Return the conditions between commas; a comma behind a backslash is one of a value."""
    parts = [match.group(1).strip() for match in _PART.finditer(text)]
    return [part for part in parts if part]


def _condition(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    name, value = name.strip().lower(), _PAIR.sub(_without_comma, value.strip())
    if not equals:
        raise ConfigurationError(f"{_shown(part)} is no condition of a filter: {HOW_TO_WRITE}")
    if name not in CONDITIONS:
        raise ConfigurationError(f"{_shown(name)} is nothing that a filter can ask for: {HOW_TO_WRITE}")
    if not value:
        raise ConfigurationError(f"{name}= is empty, which would mean every message: give a value, or leave it out")
    return name, value


def _fields_of(name: str, value: str, now: datetime) -> dict[str, object]:
    """Return the fields of a condition with their values."""
    if name == "due":
        start, end = _due_range(value, now)
        return {"due_from": start, "due_before": end}
    if name == "header":
        header, _, part = value.partition(":")
        return {"header": header.strip() or None, "header_value": part.strip() or None}
    return {CONDITIONS[name]: f"{literal(value)}*" if name == "id-prefix" else value}


def _without_comma(pair: re.Match[str]) -> str:
    """Return a comma for a backslash and a comma, and every other pair as it is: patterns read these."""
    return "," if pair[1] == "," else pair[0]


def _due_range(value: str, now: datetime) -> tuple[datetime | None, datetime | None]:
    if value.startswith(">="):
        return _instant(value[2:], now), None
    if value.startswith("<") and not value.startswith("<="):
        return None, _instant(value[1:], now)
    start, dots, end = value.partition("..")
    if not dots or not (start.strip() or end.strip()):
        raise ConfigurationError(f"due={_shown(value)} is not understood: write {DUE_FORMS}")
    return (_instant(start, now) if start.strip() else None), (_instant(end, now) if end.strip() else None)


def _instant(written: str, now: datetime) -> datetime:
    """Return the instant of a filter: `now`, a day, an instant, or a delay from now."""
    written = written.strip()
    if written == "now":
        return now
    try:
        if _DAY.fullmatch(written):
            return datetime.fromisoformat(written).replace(tzinfo=UTC)
        if written[:4].isdigit() and written[4:5] == "-":
            return parse_instant(written)
        return now + parse_shift(written)
    except (InvalidDueTime, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"due time {_shown(written)} is not understood ({error}): write {DUE_FORMS}"
        ) from error


def _escape(value: str) -> str:
    """Return a pattern as it is written among others: a backslash that means itself is doubled."""
    pairs = _PIECE.sub(lambda piece: "\\\\" if piece[3] == "\\" else piece[0], value)
    return pairs.replace(",", "\\,")


def _shown(text: str) -> str:
    """Return the beginning of a text for an error."""
    return repr(text if len(text) <= 100 else f"{text[:100]}...")
