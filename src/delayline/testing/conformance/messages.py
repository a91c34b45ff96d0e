"""Messages for conformance tests: ordinary, and such that back ends have stumbled over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from delayline.message import DelayedMessage, Message
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT: Final = "conformance"
OTHER_QUEUE: Final = "elsewhere"
AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
TICK: Final = timedelta(microseconds=1)
#: Real seconds after which a call that should have answered is given up.
PATIENCE: Final = 20.0
#: More bytes than any test's messages have.
PLENTY: Final = 1 << 40

#: Names a back end might quote, fold, cut, trim or normalise: all are different, all are valid.
HOSTILE_NAMES: Final = [
    'it\'s "quoted" `here`',
    "[dbo].[Timeouts]; DROP TABLE x; --",
    "100%_done %s %(name)s {0} \\n \\",
    "Größe/../..?*:|<>&#+=",
    "配送 🚚🕰️ \U0001f468\u200d\U0001f469",
    "$HOME ${x} @p1 :p1 ?1",
    "CON",
    ".",
    "..",
    "-rf",
    "null",
    "x" * 200,
    "🚚" * 60,
]
#: Pairs that a careless collation takes for equal.
LOOKALIKES: Final = [("id", "ID"), ("e", "é"), ("é", "e\u0301"), ("straße", "strasse"), ("a-b", "ab"), ("1", "01")]

AWKWARD_HEADERS: Final = {
    "NServiceBus.MessageId": "m",
    "Ключ 🔑": "wert äöü ß \U00010348 \u202e",
    "": "an empty name",
    "empty": "",
    "lines": "a\r\nb\tc\x00d",
    "quotes": "\"'`\\ %s ; --",
    "long": "ü" * 20_000,
}


def delayed(
    id: str = "m",
    due: datetime = AT,
    *,
    destination: str = "billing",
    body: bytes = b"body",
    headers: Mapping[str, str] | None = None,
) -> DelayedMessage:
    """Return a delayed message."""
    return DelayedMessage(Message(id, {"kind": "test"} if headers is None else headers, body), destination, due)


def operation(destination: str, id: str = "m", body: bytes = b"body") -> TransportOperation:
    """Return a send."""
    return TransportOperation(Message(id, {"kind": "test"}, body), destination)


def same(actual: DelayedMessage | None, expected: DelayedMessage) -> None:
    """Assert that a store returned a message unchanged, byte for byte."""
    assert actual is not None, f"{expected.id!r} was not returned"
    assert actual.id == expected.id
    assert actual.destination == expected.destination
    assert actual.due == expected.due
    assert actual.due.utcoffset() == timedelta(0), "due times are aware and in UTC"
    assert actual.number_of_retries == expected.number_of_retries
    assert actual.message.body == expected.message.body
    assert actual.message.encoded_headers == expected.message.encoded_headers
