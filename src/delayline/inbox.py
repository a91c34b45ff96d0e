"""The inbox: a record of each message that was handled, which commits with the rows that its handler has written."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from delayline.message import MAXIMUM_DESTINATION_LENGTH, UNUSABLE_IN_IDS, Headers

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import timedelta

    from delayline.delayed.outbox import Outbox
    from delayline.message import Message
    from delayline.transaction import Transaction


class RecordKey(NamedTuple):
    """What a handled message is known by in the inbox of its endpoint."""

    message_id: str
    sender: str
    """The endpoint that has sent it: two senders may use the same id."""


def key_of(message: Message) -> RecordKey:
    """Return the key of a message under the id that handlers see; raises CorruptHeaders."""
    sender = message.headers.get(Headers.ORIGINATING_ENDPOINT, "")
    if len(sender) > MAXIMUM_DESTINATION_LENGTH or UNUSABLE_IN_IDS.search(sender) is not None:
        sender = hashlib.sha256(sender.encode(errors="surrogatepass")).hexdigest()
    return RecordKey(message.id, sender)


class Inbox(Protocol):
    """Keeps the records of an endpoint, in the database of its handlers' rows."""

    window: timedelta
    """How long a record is kept, from when its message was handled."""
    claims_first: bool
    """Whether a message is claimed before it is handled, so that no two handlers of it run at the same time."""

    @property
    def external_domain(self) -> Hashable:
        """The domain of transactions that reach it."""
        ...

    def new_outbox(self) -> Outbox:
        """Return an outbox in the same database."""
        ...

    async def setup_infrastructure(self) -> None:
        """Create the table. Raises NewerSchema, BackendUnusable or BackendUnavailable."""
        ...

    async def missing_rights(self, endpoint_name: str, *, takes: bool) -> Sequence[str]:
        """Return the GRANT statements for missing rights; see `SupportsRightsCheck`."""
        ...

    async def start(self, endpoint_name: str) -> None:
        """Open the database, check the table, and begin to remove records whose time is over."""
        ...

    async def stop(self) -> None:
        """Undo a `start`."""
        ...

    def transaction(self) -> Transaction:
        """Return a new transaction; enter it with `async with`."""
        ...

    async def recorded(self, keys: Sequence[RecordKey]) -> AbstractSet[RecordKey]:
        """Return those of the keys that have a record."""
        ...

    async def record(self, keys: Sequence[RecordKey], transaction: Transaction | None = None) -> AbstractSet[RecordKey]:
        """Record the keys, and return those that had no record before."""
        ...

    async def claim(self, key: RecordKey) -> bool:
        """Claim a message; False if it is claimed already, here or by another process. Ends with the process."""
        ...

    def release(self, key: RecordKey) -> None:
        """Give a claim up."""
        ...
