"""Validation of setting values from a file, the environment or a flag."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from delayline.checks import full_scheme
from delayline.message import UNUSABLE_IN_IDS
from delayline.outgoing import check_endpoint_name
from delayline.transaction import TransactionMode

Read = Callable[[Any], Any]
"""Parses a setting's text; raises ValueError with the expected form."""

#: The largest whole number that every server and driver takes as a limit.
LARGEST: Final = 2**31 - 1
#: Characters of a value that is shown, or looked up.
SHOWN: Final = 200
MODES: Final = tuple(TransactionMode.__members__)


def whole(at_least: int, at_most: int = LARGEST) -> Read:
    """Read a whole number."""

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,19}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"must be a whole number of {at_least} or more")
        if value > at_most:
            raise ValueError(f"must be a whole number of {at_least} to {at_most}")
        return value

    return read


def seconds(value: object) -> float:
    """Read a length of time."""
    number = _number(value)
    if not 0 < number <= timedelta.max.total_seconds():
        raise ValueError("must be a number of seconds above 0")
    return number


def seconds_or_none(value: object) -> float:
    """Read a length of time that may be zero."""
    number = _number(value)
    if not 0 <= number <= timedelta.max.total_seconds():
        raise ValueError("must be a number of seconds of 0 or more")
    return number


def yes_or_no(value: object) -> bool:
    """Read true or false."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, str):
        value = words.get(value.strip().lower())
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - one kind of error for every value that cannot work
    return value


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        return -1.0


def name(value: object) -> str:
    """Read the name of an endpoint or queue."""
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004 - one kind of error for every value that cannot work
    return check_endpoint_name(value)


def text(value: object) -> str:
    """Read any text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    if UNUSABLE_IN_IDS.search(value) is not None:
        raise ValueError("must be UTF-8 text without NUL")
    return value


def url(value: object) -> str:
    """Read a URL; its scheme is looked at when something is opened there. `postgres:` is `postgresql:`."""
    read = full_scheme(text(value))
    if re.match(r"[A-Za-z][\w+.-]*:", read) is None:
        raise ValueError("must be a URL")
    return read


def mode(value: object) -> TransactionMode:
    """Read a transaction mode, however it is spelt."""
    if isinstance(value, TransactionMode):
        return value
    word = str(value)[:SHOWN].strip().upper().replace("-", "_").replace(" ", "_")
    if word not in TransactionMode.__members__:
        raise ValueError(f"must be one of {', '.join(MODES)}{did_you_mean(word, MODES)}")
    return TransactionMode[word]


def did_you_mean(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """Return a hint where a known word is close."""
    close = difflib.get_close_matches(word[:SHOWN], known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def masked(url: str) -> str:
    """Return the URL without passwords: for people, logs and errors."""
    url = re.sub(r"(//[^/@:]*):.*@", r"\1:***@", url)
    return re.sub(
        r"(?i)\b(password|passwd|pwd|secret|accountkey|sharedaccesssignature|sig|odbc_connect)=[^&;]*", r"\1=***", url
    )
