"""Groups of failed messages: those that failed with the same exception at the same place."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.errors import CorruptHeaders
from delayline.message import Headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.message import Message

#: Characters of a type's name that are shown, of a header that is kept, and of a stack trace that are read.
LONGEST_TYPE: Final = 300
LONGEST_KEPT: Final = 16_384
TRACE_READ: Final = 65_536
#: A frame of a Python stack trace, and of a .NET stack trace.
PYTHON_FRAME: Final = re.compile(r'\s*File "([^"\n]{1,500})", line (\d{1,9}), in ([^\n]{1,200})$')
NET_FRAME: Final = re.compile(r"^\s*at ([^\n(]{1,300})\(", re.MULTILINE)
#: Parts of paths of code that is not the user's.
FOREIGN_PATHS: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "/delayline/", "<frozen ")
FOREIGN_TYPES: Final = ("NServiceBus.", "System.", "Microsoft.")


def headers_of(message: Message) -> tuple[Mapping[str, str], str | None]:
    """Return a message's headers, and why they cannot be read, None if they can."""
    try:
        return message.headers, None
    except CorruptHeaders as error:
        return {}, str(error)


def message_type(headers: Mapping[str, str]) -> str:
    """Return the short name of the first enclosed type: of `Shop.OrderPlaced, Shop; ...` it is `Shop.OrderPlaced`."""
    return first_type(headers.get(Headers.ENCLOSED_MESSAGE_TYPES, ""))


def first_type(types: str) -> str:
    """Return the short name of the first of enclosed types."""
    return re.split("[,;]", types, maxsplit=1)[0].strip()[:LONGEST_TYPE]


class Failure(NamedTuple):
    """What is told apart of a failed message."""

    exception: str
    """The type of the exception; empty if no header names it."""
    place: str
    """Where it was raised: `handlers.py:17 in handle`; empty if unknown."""
    queue: str
    """The queue that the message failed in; empty if unknown."""
    types: str
    """The enclosed types of the message, as its header lists them."""
    damaged: bool
    """Whether its headers cannot be read."""

    @property
    def key(self) -> str:
        """The key of its group: exception and place."""
        return _key_of(self.exception, self.place, self.damaged)


def failure_of(message: Message) -> Failure:
    """Return what is told apart of a failed message."""
    return failure_in(*headers_of(message))


def failure_in(headers: Mapping[str, str], damaged: str | None) -> Failure:
    """Return what is told apart of a message with these headers; `damaged` says why they cannot be read, if so."""
    return Failure(
        headers.get(Headers.EXCEPTION_TYPE, "")[:LONGEST_KEPT],
        place_of(headers),
        headers.get(Headers.FAILED_QUEUE, "")[:LONGEST_KEPT],
        headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")[:LONGEST_KEPT],
        damaged is not None,
    )


def place_of(headers: Mapping[str, str]) -> str:
    """Return where an exception was raised: the innermost frame of the user's own code in its stack trace."""
    trace = headers.get(Headers.EXCEPTION_STACK_TRACE, "")[:TRACE_READ]
    innermost = ""
    for line in reversed(trace.split("\n")):
        frame = PYTHON_FRAME.match(line)
        if frame is None:
            continue
        path, number, function = frame.groups()
        path = path.replace("\\", "/")
        place = f"{path.rsplit('/', 1)[-1]}:{number} in {function}"
        if not any(part in path for part in FOREIGN_PATHS):
            return place
        innermost = innermost or place
    if innermost:
        return innermost
    methods = NET_FRAME.findall(trace)
    own_methods = [method for method in methods if not method.startswith(FOREIGN_TYPES)]
    return str(next(iter(own_methods or methods), "")).strip()


def group_key(message: Message) -> str:
    """Return the key of a failed message's group."""
    return failure_of(message).key


@lru_cache(maxsize=4096)
def _key_of(exception: str, place: str, damaged: bool) -> str:
    parts = (exception, place, "damaged" if damaged else "")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
