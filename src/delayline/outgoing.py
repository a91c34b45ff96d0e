"""Outgoing messages: arguments are validated, ids and headers assigned, due times computed, and destinations looked up.

The destination of a delayed message is looked up when it is sent: a misspelling would be found weeks later.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import reprlib
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import accumulate, islice, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypedDict, Unpack, get_args

from delayline.clock import latest_of
from delayline.delayed.delivery import StoredDelivery, SupportsDeferMany
from delayline.delayed.store import SendConflict, StoreResult
from delayline.errors import (
    ConfigurationError,
    DelaylineError,
    DuplicateMessage,
    InvalidDueTime,
    InvalidMessage,
    QueueNotFound,
)
from delayline.external import UNSET
from delayline.failures import MACHINE
from delayline.message import (
    JSON_SERIALIZER,
    MAXIMUM_DESTINATION_LENGTH,
    MAXIMUM_ID_LENGTH,
    Body,
    Headers,
    HeaderTemplate,
    Message,
    encode_body,
    from_time_span,
    id_from,
    in_utc,
    new_message_id,
    to_time_span,
    to_wire_time,
)
from delayline.routes import Routes
from delayline.serialization import PLAIN_TYPES, names_in_header, names_of_value
from delayline.topics import MAXIMUM_TOPIC_LENGTH, is_topic, topic_address
from delayline.transport import SupportsQueueLookup, TransportOperation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.clock import Clock
    from delayline.delayed.delivery import DelayedDelivery
    from delayline.external import ExternalConnection, ExternalTransaction, Unset
    from delayline.observer import Observer, SupportsTraces
    from delayline.serialization import Serializer
    from delayline.transaction import Transaction
    from delayline.transport import Transport


HeaderMap = Mapping[str, str]
NO_DELAY: Final = timedelta(0)
LONGEST_TIME_SPAN: Final = timedelta(days=10_675_199)  # of .NET: https://learn.microsoft.com/dotnet/api/system.timespan
HEADERS_OF_SEND: Final = (
    Headers.MESSAGE_ID,
    Headers.CORRELATION_ID,
    Headers.CONVERSATION_ID,
    Headers.CONTENT_TYPE,
    Headers.TIME_SENT,
    Headers.DELIVER_AT,
)
#: By the following headers of a reply NServiceBus finds the saga that sent the request.
OF_SAGA: Final = {
    Headers.ORIGINATING_SAGA_ID: Headers.SAGA_ID,
    Headers.ORIGINATING_SAGA_TYPE: Headers.SAGA_TYPE,
}
ONLY_STR: Final = frozenset({str})
CONFLICT_POLICIES: Final = get_args(SendConflict)
CONFLICT_CHOICES: Final = "'keep', 'replace', 'postpone' or 'raise'"
#: So many seconds a message that is to be postponed waits for the dispatch of the pending one, and how often it looks.
DISPATCHED_WITHIN: Final = 10.0
LOOKS_AT_DISPATCH_EVERY: Final = 0.02
#: The remedy for an endpoint without delayed delivery.
DELAYED_DELIVERIES: Final = (
    "pass delayed_delivery=StoredDelivery(...), or DelayLevelDelivery() where its queues are on RabbitMQ"
)
#: Rounds of retries whose copies a search by id finds.
MOST_ROUNDS: Final = 10
COPIES: Final = uuid.UUID("5b7a1d5e-3f0c-4c7e-9d1e-8a6f0b2c4d10")


class Conflict(NamedTuple):
    """What happens to a pending message with the id of a message that is sent."""

    policy: SendConflict
    at_most: timedelta | None
    """How long after the first send the message is due at the latest; None for no limit."""


class Outgoing(NamedTuple):
    """An operation, and when it is due; None is now."""

    operation: TransportOperation
    due: datetime | None
    check: bool = False
    """Whether its destination is looked for before it is deferred."""
    conflict: Conflict | None = None
    """What happens to a pending message with its id, if the sender has said so; it is then deferred."""


class PendingChange(NamedTuple):
    """A change of a pending message that a handler has asked for; `due` is None to cancel the message."""

    message_id: str
    due: datetime | None


#: What a handler has asked for, in its order.
Effect: TypeAlias = Outgoing | PendingChange


def _id_of_copy(message_id: str) -> str:
    return id_from(COPIES, message_id)


def copies_of(message_id: str) -> tuple[str, ...]:
    """Return the ids under which a message waits to be handled again, of its first rounds of retries."""
    return tuple(islice(accumulate(repeat(message_id), lambda of, _: _id_of_copy(of)), 1, MOST_ROUNDS + 1))


def report_sent(observer: Observer, sends: Sequence[Outgoing], seconds: float, error: Exception | None) -> None:
    """Report messages that were sent, or failed to be, to an observer."""
    for operation, delayed in (("send", False), ("schedule", True)):
        if destinations := [send.operation.destination for send in sends if (send.due is not None) is delayed]:
            observer.sent(operation, destinations, seconds, error)


async def hand_over(
    transport: Transport, delivery: DelayedDelivery | None, sends: Sequence[Outgoing], transaction: Transaction | None
) -> None:
    """Dispatch what is due and defer the rest, in the transaction if given. Raises DispatchFailed."""
    now, later = [], []
    for send in sends:
        operation, due, _, conflict = send
        if due is None:
            now.append(operation)
        elif conflict is not None:
            await place(delivery, send, transaction)
        else:
            later.append((operation, due))
    if now:
        await transport.dispatch(now, transaction)
    if not later:
        return
    if delivery is None:
        raise ConfigurationError(f"a delay needs delayed delivery: {DELAYED_DELIVERIES}")
    if len(later) == 1:
        await delivery.defer(*later[0], transaction)
    elif isinstance(delivery, SupportsDeferMany):
        await delivery.defer_many(later, transaction)
    else:
        await _defer_each(delivery, later, transaction)


async def place(delivery: DelayedDelivery | None, send: Outgoing, transaction: Transaction | None) -> StoreResult:
    """Store a message that has a `conflict`, and return what became of it.

    A message that is being dispatched cannot be postponed: outside a transaction this waits a moment until it has left,
    and stores the new message then. In a transaction a poller might wait for that in turn.

    Raises DuplicateMessage or ConfigurationError.
    """
    operation, due, _, conflict = send
    assert due is not None  # noqa: S101 - as composed
    assert conflict is not None  # noqa: S101
    policy, at_most = conflict
    if not isinstance(delivery, StoredDelivery):
        kind = type(delivery).__name__
        raise ConfigurationError(f"on_conflict needs a delayed message store, and this endpoint has {kind}")
    replace, message_id = policy in ("replace", "postpone"), operation.message.id
    began = time.monotonic()
    while True:
        result = await delivery.defer_or_replace(
            operation, due, replace=replace, at_most=at_most, transaction=transaction
        )
        if result is not StoreResult.DISPATCHING or policy != "postpone":
            break
        if transaction is not None or time.monotonic() - began > DISPATCHED_WITHIN:
            break
        await asyncio.sleep(LOOKS_AT_DISPATCH_EVERY)
    if result is StoreResult.DISPATCHING:
        problem = "is being dispatched and cannot be replaced: give the new message another id"
        if policy == "postpone":
            problem = "is being dispatched, or changed by another transaction, and cannot be postponed: send it again"
        raise DuplicateMessage(message_id, f"message {message_id!r} {problem}")
    if result is StoreResult.KEPT and policy == "raise":
        problem = "is pending already, and nothing was stored: use on_conflict='replace' to replace it"
        raise DuplicateMessage(message_id, f"message {message_id!r} {problem}")
    return result


async def _defer_each(
    delivery: DelayedDelivery, later: Sequence[tuple[TransportOperation, datetime]], transaction: Transaction | None
) -> None:
    if transaction is not None:
        for operation, due in later:
            await delivery.defer(operation, due, transaction)
        return
    deferring = [delivery.defer(operation, due) for operation, due in later]
    for error in await asyncio.gather(*deferring, return_exceptions=True):  # none goes on after an error is raised
        if error is not None:
            raise error


class MessageOptions(TypedDict, total=False):
    """What can be said of a message that is sent, beside its destination and its body; see `Endpoint.send`."""

    headers: HeaderMap | None
    message_id: str | None
    delay: timedelta | None
    deliver_at: datetime | None
    expires: timedelta | None
    correlation_id: str | None
    check_destination: bool
    on_conflict: SendConflict | None
    at_most: timedelta | None


class SendOptions(MessageOptions, total=False):
    """What can be said of a message that `Endpoint.send` sends; see there."""

    transaction: ExternalConnection | ExternalTransaction | Transaction | Unset


class PublishOptions(TypedDict, total=False):
    """What can be said of an event that is published; see `Endpoint.send`."""

    headers: HeaderMap | None
    message_id: str | None
    delay: timedelta | None
    deliver_at: datetime | None
    expires: timedelta | None
    correlation_id: str | None
    on_conflict: SendConflict | None
    at_most: timedelta | None


class RequestOptions(TypedDict, total=False):
    """What can be said of a request, beside its destination, its body and its timeout; see `Endpoint.request`."""

    headers: HeaderMap | None
    message_id: str | None


class Send(NamedTuple):
    """A message of `send_many`; its arguments are the arguments of `Endpoint.send`.

    A message whose type has a route needs no destination: `Send(body=Bill(17))`.

    Args:
        destination: Name of the queue, 1 to 200 characters; left out for the route of the body's type.
        body: Bytes, text, or a value that the serializer writes.
        headers: Further headers, str to str.
        message_id: Id of 1 to 250 characters; by default a new UUID.
        delay: Time to wait, zero or more; excludes `deliver_at`.
        deliver_at: Due time, an aware `datetime`.
        expires: How long the message may wait in its queue.
        correlation_id: Id of the exchange that the message belongs to, 1 to 250 characters.
        on_conflict: What happens to a pending message with the same `message_id`.
        at_most: With `on_conflict="postpone"`, the longest time from the first send to the due time.
    """

    destination: str | Unset = UNSET
    body: Body = UNSET
    headers: HeaderMap | None = None
    message_id: str | None = None
    delay: timedelta | None = None
    deliver_at: datetime | None = None
    expires: timedelta | None = None
    correlation_id: str | None = None
    on_conflict: SendConflict | None = None
    at_most: timedelta | None = None


class Composer:
    """Composes an endpoint's outgoing operations from the arguments of `send`."""

    def __init__(
        self,
        endpoint_name: str,
        clock: Clock,
        *,
        reply_to: str | None,
        serializer: Serializer = JSON_SERIALIZER,
        routes: Routes | None = None,
        publishes: bool = False,
    ) -> None:
        self.routes: Routes = Routes() if routes is None else routes
        self._publishes = publishes
        self._latest, self._earliest = latest_of(clock), clock.now
        self._serializer = serializer
        self._fixed = fixed_headers(endpoint_name, reply_to)
        self._sent_now = HeaderTemplate(HEADERS_OF_SEND[:-1], self._fixed)
        self._sent_delayed = HeaderTemplate(HEADERS_OF_SEND, self._fixed)
        self.traces: SupportsTraces | None = None
        """What headers of traces come from."""

    def routed(self, destination: Any, body: Body) -> tuple[str, Body]:  # noqa: ANN401 - a queue, or a body alone
        """Return destination and body of a send that may leave the destination out.

        Raises InvalidMessage where the body's type has no route.
        """
        if body is UNSET:
            if destination is UNSET:
                raise InvalidMessage("send has neither destination nor body: give send(destination, body)")
            return self.routes.queue_for(destination), destination
        return (self.routes.queue_for(body) if destination is UNSET else destination), body

    def publication(self, event: Body, **options: Unpack[PublishOptions]) -> Send:
        """Return what sends an event to its topic. Raises InvalidMessage, or ConfigurationError without topics."""
        if not self._publishes:
            raise ConfigurationError(
                "the queues of this endpoint have no subscriptions: publish needs queues in a SQL database, "
                "on RabbitMQ, on Azure Storage or in memory"
            )
        headers = {Headers.INTENT: "Publish", **check_headers(options.get("headers") or {})}
        types = headers.get(Headers.ENCLOSED_MESSAGE_TYPES) or names_of_value(event)
        names = names_in_header(types or "")
        if not names or len(names[0]) > MAXIMUM_TOPIC_LENGTH:
            raise InvalidMessage(
                f"an event needs a type with a name of 1 to {MAXIMUM_TOPIC_LENGTH} characters, by which endpoints "
                f"subscribe, and this {type(event).__name__} has {names[0] if names else 'none'!r}: publish a value of "
                "a dataclass or of a class with @message_type"
            )
        options["headers"] = headers
        return Send(topic_address(names[0]), event, **options)

    def compose(self, send: Send, related_to: Message | None = None) -> Outgoing:
        """Return the checked operation, which waits if it is not due; with the only reading of the clock for it.

        Raises InvalidMessage or InvalidDueTime, naming value and remedy.
        """
        return self._compose(send, related_to, self._now(send.deliver_at))

    def _compose(self, send: Send, related_to: Message | None, now: datetime) -> Outgoing:
        destination, body, headers, message_id, delay, deliver_at, expires, correlation_id, on_conflict, at_most = send
        if destination is UNSET or body is UNSET:
            destination, body = self.routed(destination, body)
        check_name("destination", destination, MAXIMUM_DESTINATION_LENGTH)
        due = due_time(now, delay, deliver_at)
        conflict = None
        if on_conflict is not None or at_most is not None:
            conflict = checked_conflict(on_conflict, at_most, message_id, due)
            due = _at_latest(now, due, at_most)
        if message_id is None:
            message_id = new_message_id(now)
        else:
            check_name("message_id", message_id, MAXIMUM_ID_LENGTH)
        encoded, content_type = encode_body(body, self._serializer)
        if type(body) not in PLAIN_TYPES and (types := names_of_value(body)):
            headers = {Headers.ENCLOSED_MESSAGE_TYPES: types, **(headers or {})}
        if expires is not None:
            headers = {**(headers or {}), Headers.TIME_TO_BE_RECEIVED: _time_to_be_received(expires)}
        if correlation_id is not None:
            check_name("correlation_id", correlation_id, MAXIMUM_ID_LENGTH)
            headers = {**(headers or {}), Headers.CORRELATION_ID: correlation_id}
        if self.traces is not None:
            delay = None if due is None else due - now
            headers = {**self.traces.headers(destination, message_id, due, delay), **(headers or {})}
        values = sent_values(message_id, content_type, now, due)
        template = self._sent_now if due is None else self._sent_delayed
        if headers or related_to is not None or '"' in message_id or "\\" in message_id:
            message = Message(message_id, completed(template.headers(values), headers, related_to), encoded)
        else:
            message = template.message(message_id, values, encoded)
        if conflict is not None:
            return Outgoing(TransportOperation(message, destination), due, conflict=conflict)
        return Outgoing(TransportOperation(message, destination), None if due is None or due <= now else due)

    def compose_many(self, sends: Iterable[Send], related_to: Message | None = None) -> list[Outgoing]:
        """Return the checked operations; raises as `compose`, with the position of the message."""
        composed: list[Outgoing] = []
        latest, earliest = self._latest(), self._earliest()
        for position, send in enumerate(sends):
            if not isinstance(send, Send):
                raise InvalidMessage(f"message {position} of send_many is {send!r}: give Send(destination, body, ...)")
            try:
                now = latest if send.deliver_at is None else earliest
                composed.append(self._compose(send, related_to, now))
            except InvalidMessage as error:
                raise type(error)(f"message {position} of send_many: {error}") from error
        return composed

    def forward(
        self, received: Message, destination: str, delay: timedelta | None, deliver_at: datetime | None
    ) -> Outgoing:
        """Return the received message, as it is, for another queue; with a delay it has no time to be received."""
        check_name("destination", destination, MAXIMUM_DESTINATION_LENGTH)
        now = self._now(deliver_at)
        due = due_time(now, delay, deliver_at)
        if due is not None:
            received = _waiting(received, due)
        return Outgoing(TransportOperation(received, destination), _unless_past(due, now))

    def reply(self, to: Message, body: Body, headers: HeaderMap | None, delay: timedelta | None) -> Outgoing:
        """Return a reply to `to`; raises InvalidMessage when it has no reply address."""
        address = to.headers.get(Headers.REPLY_TO)
        if not address:
            raise InvalidMessage(
                f"message {to.id!r} has no {Headers.REPLY_TO} header: its sender has no queue for replies. "
                "Use context.send with a destination"
            )
        answer = {Headers.CORRELATION_ID: to.headers.get(Headers.CORRELATION_ID, to.id), Headers.INTENT: "Reply"}
        if _is_guid(to.headers.get(Headers.ORIGINATING_SAGA_ID, "")):
            answer |= {name: to.headers[origin] for origin, name in OF_SAGA.items() if to.headers.get(origin)}
        sent = answer | dict(check_headers(headers or {}))
        return self.compose(Send(address, body, headers=sent, delay=delay), to)

    def again(
        self,
        received: Message,
        queue: str,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        headers: HeaderMap | None = None,
    ) -> Outgoing:
        """Return the received message as a new copy, to be handled again later.

        Handlers see the same message id, which is in the headers. The copy's own id, which stores go by, follows from
        the received copy's: the store may not have removed it yet, and a redelivery makes the same copy again.
        The copy has no time to be received: that ended when the message was received.
        """
        now = self._now(deliver_at)
        due = due_time(now, delay, deliver_at)
        own = received.headers.get(Headers.MESSAGE_ID) or received.id
        named = _waiting(received, due).with_headers({Headers.MESSAGE_ID: own, **(headers or {})})
        copy = Message(_id_of_copy(received.id), named.headers, received.body)
        return Outgoing(TransportOperation(copy, queue), _unless_past(due, now))

    def _now(self, deliver_at: datetime | None) -> datetime:
        """Return the present time: the latest it can be, to which a delay is added; the earliest for a due time."""
        return self._latest() if deliver_at is None else self._earliest()


def checked_conflict(
    on_conflict: SendConflict | None, at_most: timedelta | None, message_id: str | None, due: datetime | None
) -> Conflict:
    """Return the conflict of a send with these arguments. Raises InvalidMessage or InvalidDueTime."""
    if at_most is not None and on_conflict != "postpone":
        raise InvalidMessage(f"at_most={at_most!r} is for on_conflict='postpone': give both, or leave at_most out")
    if on_conflict is None or on_conflict not in CONFLICT_POLICIES:
        raise InvalidMessage(f"on_conflict must be {CONFLICT_CHOICES}, not {on_conflict!r}")
    if message_id is None or due is None:
        raise InvalidMessage("on_conflict is for delayed messages with an id: give message_id, and a delay or time")
    if at_most is not None and (not isinstance(at_most, timedelta) or at_most <= NO_DELAY):
        raise InvalidDueTime(f"at_most must be a timedelta above zero, not {at_most!r}: use timedelta(hours=1)")
    return Conflict(on_conflict, at_most)


def _at_latest(now: datetime, due: datetime | None, at_most: timedelta | None) -> datetime | None:
    """Return the due time of a first send, `at_most` after now at the latest. Raises InvalidDueTime."""
    if due is None or at_most is None:
        return due
    try:
        return min(due, now + at_most)
    except OverflowError as error:
        raise InvalidDueTime(f"at_most={at_most!r} leads beyond year 9999: use a shorter time") from error


def _unless_past(due: datetime | None, now: datetime) -> datetime | None:
    """Return when a message is due; None for now."""
    return None if due is None or due <= now else due


def _waiting(received: Message, due: datetime | None) -> Message:
    """Return a received message as it waits until `due`, without a time to be received."""
    deliver_at = {} if due is None else {Headers.DELIVER_AT: to_wire_time(due)}
    return received.with_headers(deliver_at, without=(Headers.TIME_TO_BE_RECEIVED,))


def due_time(now: datetime, delay: timedelta | None, deliver_at: datetime | None) -> datetime | None:
    """Return when a message is due, in UTC; None for now. Raises InvalidDueTime."""
    if delay is not None and deliver_at is not None:
        raise InvalidDueTime(f"delay={delay!r} and deliver_at={deliver_at!r} exclude each other: give one of them")
    if deliver_at is not None:
        return in_utc(deliver_at)
    if delay is None:
        return None
    if not isinstance(delay, timedelta):
        raise InvalidDueTime(f"delay must be a timedelta, not {delay!r}: use timedelta(seconds=...)")
    if delay < NO_DELAY:
        raise InvalidDueTime(f"delay={delay!r} is negative: a message cannot be due before it is sent")
    try:
        return now + delay if delay else None
    except OverflowError as error:
        raise InvalidDueTime(f"delay={delay!r} leads beyond year 9999: use a shorter delay") from error


def check_name(what: str, name: str, longest: int) -> None:
    """Refuse a queue name or message id that a back end would cut, lose or quote wrongly."""
    if not isinstance(name, str) or not name:
        raise InvalidMessage(f"{what} must be a text of 1 to {longest} characters, not {name!r}")
    if len(name) > longest:
        raise InvalidMessage(f"{what} has {len(name)} characters, {longest} at most: {name[:40]!r}...")
    if not name.isprintable() or name != name.strip():
        raise InvalidMessage(f"{what} {name!r} has control characters, or spaces around it: remove them")


def _is_guid(text: str) -> bool:
    """Return whether a header has the id of a saga, which every reader of it takes for a GUID."""
    with contextlib.suppress(ValueError):
        return bool(uuid.UUID(text))
    return False


def check_endpoint_name(name: str) -> str:
    """Return the name of an endpoint, which names its queue; raises ConfigurationError."""
    try:
        check_name("endpoint name", name, MAXIMUM_DESTINATION_LENGTH)
    except InvalidMessage as error:
        raise ConfigurationError(str(error)) from error
    if is_topic(name):
        raise ConfigurationError(f"an endpoint cannot be named {name!r}, like the topic of an event: name it otherwise")
    return name


def sent_headers(message_id: str, content_type: str, now: datetime, due: datetime | None) -> dict[str, str]:
    """Return the headers that differ from send to send."""
    return dict(zip(HEADERS_OF_SEND, sent_values(message_id, content_type, now, due), strict=False))


def sent_values(message_id: str, content_type: str, now: datetime, due: datetime | None) -> tuple[str, ...]:
    """Return the values in the order of `HEADERS_OF_SEND`; the last is omitted for messages due now."""
    values = (message_id, message_id, message_id, content_type, to_wire_time(now))
    return values if due is None else (*values, to_wire_time(due))


def fixed_headers(endpoint_name: str, reply_to: str | None) -> dict[str, str]:
    """Return the headers that everything from the endpoint has."""
    fixed = {
        Headers.INTENT: "Send",
        Headers.ORIGINATING_ENDPOINT: endpoint_name,
        Headers.ORIGINATING_MACHINE: MACHINE,
    }
    return fixed if reply_to is None else fixed | {Headers.REPLY_TO: reply_to}


def completed(sent: dict[str, str], headers: HeaderMap | None, related_to: Message | None = None) -> dict[str, str]:
    """Return the headers of a send with the user's, which win but for the message id. Raises InvalidMessage."""
    message_id = sent[Headers.MESSAGE_ID]
    if related_to is not None:
        sent[Headers.RELATED_TO] = related_to.id
        sent[Headers.CONVERSATION_ID] = related_to.headers.get(Headers.CONVERSATION_ID, related_to.id)
        sent[Headers.CORRELATION_ID] = related_to.headers.get(Headers.CORRELATION_ID) or message_id
    if headers:
        sent |= check_headers(headers)
        sent[Headers.MESSAGE_ID] = message_id
    return sent


def check_headers(headers: HeaderMap) -> HeaderMap:
    """Return the headers. Raises InvalidMessage for entries that are not str to str, or an unreadable time."""
    if _plain(headers):
        return headers
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping of str to str, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(  # reprlib, because a value may be nested too deep for repr
                "header {0}: {1} must be str to str; convert it, as in str({1})".format(
                    *map(reprlib.repr, (name, value))
                )
            )
        if name == Headers.TIME_TO_BE_RECEIVED:
            _check_time_span(value)
        if not name:
            raise InvalidMessage(f"a header with the value {value!r} has an empty name")
    return headers


def _plain(headers: HeaderMap) -> bool:
    """Return whether the headers surely need no further checks; it runs for millions of messages."""
    if type(headers) is not dict or "" in headers or Headers.TIME_TO_BE_RECEIVED in headers:
        return False
    return ONLY_STR.issuperset(map(type, headers)) and ONLY_STR.issuperset(map(type, headers.values()))


def _time_to_be_received(expires: timedelta) -> str:
    if not isinstance(expires, timedelta) or not NO_DELAY < expires <= LONGEST_TIME_SPAN:
        raise InvalidMessage(f"expires must be a timedelta above zero and of 10675199 days at most, not {expires!r}")
    return to_time_span(expires)


def _check_time_span(value: str) -> None:
    try:
        from_time_span(value)
    except ValueError as error:
        raise InvalidMessage(
            f"header {Headers.TIME_TO_BE_RECEIVED!r} is {value!r}, not a time as in 00:05:00 or 1.00:00:00 (a day)"
        ) from error


#: A send waits no longer for the answer; without an answer the message is stored unchecked.
CHECK_PATIENCE: Final = 2.0  # seconds
UNCHECKED_FOR: Final = timedelta(minutes=1)
#: For so long a queue that is missing is not asked for again, as in a file with thousands of lines for it.
MISSING_FOR: Final = timedelta(seconds=1)
MOST_MISSING: Final = 1000
MOST_COMPARED: Final = 10_000
SIMILAR: Final = 2


class Destinations:
    """The queues that were found once; a further send to such a queue asks nothing. Belongs to an event loop."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._found: set[str] = set()
        self._missing: dict[str, tuple[datetime, Sequence[str]]] = {}
        self._unchecked_until: datetime | None = None
        self._asking = asyncio.Lock()

    def needs_check(self, queue: str) -> bool:
        """Return whether `check` asks the transport."""
        known = queue in self._found or is_topic(queue)
        return not known and isinstance(self._transport, SupportsQueueLookup)

    async def similar(self, queue: str) -> Sequence[str]:
        """Return the queues with names like that of a queue that does not exist, the most similar first."""
        if not isinstance(self._transport, SupportsQueueLookup):
            return ()
        now = self._clock.now()
        until, similar = self._missing.get(queue, (now, ()))
        if until <= now:
            until, similar = now + MISSING_FOR, await _similar(self._transport, queue)
            self._keep_missing(queue, until, similar)
        return similar

    async def check(self, queue: str) -> None:
        """Raise QueueNotFound for a queue that does not exist; pass where the transport cannot look it up now."""
        if not self.needs_check(queue) or not isinstance(self._transport, SupportsQueueLookup):
            return
        async with self._asking:  # many simultaneous sends to a queue ask once
            if queue not in self._found:
                await self._ask(self._transport, queue)

    async def _ask(self, transport: SupportsQueueLookup, queue: str) -> None:
        now = self._clock.now()
        if self._unchecked_until is not None and now < self._unchecked_until:
            return
        until, similar = self._missing.pop(queue, (now, ()))
        if until <= now:
            try:
                async with asyncio.timeout(CHECK_PATIENCE):
                    exists = await transport.has_queue(queue)
            except (DelaylineError, TimeoutError):  # the message can be stored all the same
                self._unchecked_until = self._clock.now() + UNCHECKED_FOR
                return
            if exists:
                self._found.add(queue)
                return
            until, similar = self._clock.now() + MISSING_FOR, await _similar(transport, queue)
        self._keep_missing(queue, until, similar)
        unless = ", or pass check_destination=False where it will exist in time"
        raise QueueNotFound(queue, similar=similar, unless=unless)

    def _keep_missing(self, queue: str, until: datetime, similar: Sequence[str]) -> None:
        if queue in self._missing or len(self._missing) < MOST_MISSING:
            self._missing[queue] = until, similar


async def _similar(transport: SupportsQueueLookup, queue: str) -> list[str]:
    try:
        async with asyncio.timeout(CHECK_PATIENCE):
            names = await transport.queues()
    except (DelaylineError, TimeoutError):
        return []
    return difflib.get_close_matches(queue, list(names)[:MOST_COMPARED], n=SIMILAR)
