"""Groups of failed messages: those that failed in the same way, at the same place, in the same queue."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

from delayline.errors import CorruptHeaders
from delayline.message import Headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayline.message import Message

#: Characters of a type's name, and of a stack trace, that are read.
LONGEST_TYPE: Final = 300
TRACE_READ: Final = 65_536
#: A frame of a Python stack trace, and of a .NET stack trace.
PYTHON_FRAME: Final = re.compile(r'^\s*File "([^"\n]{1,500})", line (\d{1,9}), in ([^\n]{1,200})$', re.MULTILINE)
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
    return re.split("[,;]", headers.get(Headers.ENCLOSED_MESSAGE_TYPES, ""), maxsplit=1)[0].strip()[:LONGEST_TYPE]


def place_of(headers: Mapping[str, str]) -> str:
    """Return where an exception was raised: the innermost frame of the user's own code in its stack trace."""
    trace = headers.get(Headers.EXCEPTION_STACK_TRACE, "")[:TRACE_READ]
    frames = PYTHON_FRAME.findall(trace)
    own = [frame for frame in frames if not any(part in frame[0].replace("\\", "/") for part in FOREIGN_PATHS)]
    for path, line, function in reversed(own or frames):
        name = path.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{line} in {function}"
    methods = NET_FRAME.findall(trace)
    own_methods = [method for method in methods if not method.startswith(FOREIGN_TYPES)]
    return str(next(iter(own_methods or methods), "")).strip()


def group_key(message: Message) -> str:
    """Return the key of a failed message's group."""
    headers, damaged = headers_of(message)
    parts = (
        headers.get(Headers.EXCEPTION_TYPE, ""),
        place_of(headers),
        headers.get(Headers.FAILED_QUEUE, ""),
        message_type(headers),
        "damaged" if damaged else "",
    )
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
