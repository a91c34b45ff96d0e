"""How delays, instants and sizes are written by people, and shown to them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from delayline.errors import InvalidDueTime

DELAYS: Final = "5s, 10m, 2h, 3d, 1h30m or ISO 8601 as in PT5M"
INSTANTS: Final = "ISO 8601 with a zone, as in 2026-05-01T09:00:00+02:00 or 2026-05-01T07:00:00Z"

LONGEST_READABLE: Final = 100
"""Characters of a delay or an instant."""

_UNITS: Final = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds"}
_NUMBER: Final = r"(\d{1,12}(?:\.\d{1,6})?)"
_PART: Final = re.compile(rf"{_NUMBER}\s*(ms|[wdhms])\s*")
_ISO: Final = re.compile(
    rf"P(?=.)(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=.)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?", re.ASCII
)


def parse_delay(written: str) -> timedelta:
    """Return the delay written as 5s, 10m, 2h, 3d, 1h30m, 250ms or PT5M. Raises InvalidDueTime."""
    written = _short("delay", written, DELAYS)
    iso = _ISO.fullmatch(written.upper())
    parts = _PART.findall(written.lower())
    try:
        if iso is not None:
            weeks, days, hours, minutes, seconds = (float(part or 0) for part in iso.groups())
            return timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
        if parts and _PART.sub("", written.lower()) == "":
            return sum((timedelta(**{_UNITS[unit]: float(number)}) for number, unit in parts), timedelta(0))
    except OverflowError as error:
        raise InvalidDueTime(f"delay {written!r} is longer than time lasts: use a shorter delay") from error
    raise InvalidDueTime(f"delay {written!r} is not understood: write {DELAYS}")


def parse_shift(written: str) -> timedelta:
    """Return a delay that may go back, as in -2h. Raises InvalidDueTime."""
    written = written.strip()
    return -parse_delay(written[1:]) if written.startswith("-") else parse_delay(written)


def parse_instant(written: str) -> datetime:
    """Return the aware instant that an ISO 8601 text names. Raises InvalidDueTime."""
    written = _short("time", written, INSTANTS)
    try:
        instant = datetime.fromisoformat(written)
    except ValueError as error:
        raise InvalidDueTime(f"time {written!r} is not understood: write {INSTANTS}") from error
    if instant.utcoffset() is None:
        raise InvalidDueTime(f"time {written!r} has no time zone: write {INSTANTS}")
    try:
        return instant.astimezone(UTC)
    except OverflowError as error:
        raise InvalidDueTime(f"time {written!r} lies beyond year 9999 in UTC: use an earlier time") from error


def _short(what: str, written: str, forms: str) -> str:
    written = written.strip()
    if len(written) > LONGEST_READABLE:
        raise InvalidDueTime(
            f"{what} {written[:40]!r}... of {len(written)} characters is not understood: write {forms}"
        )
    return written


def in_the_future(instant: datetime, now: datetime) -> datetime:
    """Return the instant; raises InvalidDueTime when it has passed."""
    if instant <= now:
        raise InvalidDueTime(
            f"{instant.isoformat()} has passed: it is {now.isoformat(timespec='seconds')}. "
            "Give a time to come, or leave it out to send now"
        )
    return instant


def local(instant: datetime) -> str:
    """Return the instant in this machine's zone."""
    return f"{instant.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def relative(instant: datetime, now: datetime) -> str:
    """Return the instant as seen from `now`: in 4 min 3 s, 12 s overdue."""
    span = duration(abs(instant - now))
    return f"in {span}" if instant > now else f"{span} overdue"


def duration(span: timedelta) -> str:
    """Return a span with its two largest units: 3 d 4 h, 45 s, 0.2 s."""
    seconds = span.total_seconds()
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("y", 31_536_000), ("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 "))


def size(number_of_bytes: int) -> str:
    """Return a size people can read: 12 B, 3.4 KB."""
    value = float(number_of_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
