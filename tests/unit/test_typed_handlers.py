"""Handlers for types of messages, serializers, and handlers that are plain functions."""

from __future__ import annotations

import asyncio
import enum
import functools
import json
import logging
import threading
import typing
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pydantic
import pytest
from tests.eventually import eventually_async
from tests.unit.conftest import Scenario, build

from delayline import (
    ConfigurationError,
    Endpoint,
    Headers,
    InvalidMessage,
    JsonSerializer,
    MemoryTransport,
    Message,
    MessageContext,
    Recoverability,
    Serializer,
    SyncEndpoint,
    message_type,
)
from delayline.errors import InvalidPayload
from delayline.events import Event
from delayline.testing.clock import settle
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from delayline.testing.clock import ManualClock

TYPES = Headers.ENCLOSED_MESSAGE_TYPES


class Colour(enum.Enum):
    RED = "red"


@message_type("Contoso.Messages.OrderPlaced")
@dataclass
class OrderPlaced:
    order_id: str
    lines: list[Line] = field(default_factory=list)


@dataclass
class Line:
    price: Decimal
    at: datetime
    on: date
    id: uuid.UUID
    colour: Colour
    tags: set[str]


@message_type("Contoso.Messages.GiftOrderPlaced")
@dataclass
class GiftOrderPlaced(OrderPlaced):
    greeting: str = ""


class Invoice(pydantic.BaseModel):
    number: int
    paid: Decimal


class Ping(msgspec.Struct):
    sequence: int


class Note(TypedDict):
    text: str


LINE = Line(Decimal("1.10"), datetime(2026, 5, 1, tzinfo=UTC), date(2026, 5, 2), uuid.UUID(int=7), Colour.RED, {"a"})
ORDER = OrderPlaced("17", [LINE])


def headers_of(kind: str, **more: str) -> dict[str, str]:
    return {TYPES: kind, Headers.CONTENT_TYPE: "application/json", **more}


async def put(scenario: Scenario, headers: dict[str, str], body: bytes) -> None:
    """Put a message into the endpoint's queue as another system does."""
    await scenario.transport.dispatch([TransportOperation(Message("m", headers, body), "sales")])
    await settle()


async def test_messages_go_to_the_handlers_of_their_types(clock: ManualClock) -> None:
    # Given handlers for several kinds of types, and one for all other messages
    scenario = build(clock)
    endpoint = scenario.endpoint
    seen: list[object] = []

    @endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order)

    @endpoint.handles(Invoice)
    async def bill(invoice: Invoice, context: MessageContext) -> None:
        seen.append(invoice)

    @endpoint.handles(Ping)
    async def ping(value: Ping, context: MessageContext) -> None:
        seen.append(value)

    @endpoint.handles("notes")
    async def note(value: Any, context: MessageContext) -> None:  # noqa: ANN401
        seen.append((value, context.message.headers[TYPES]))

    @endpoint.handler
    async def rest(message: Message, context: MessageContext) -> None:
        seen.append(message.body)

    # When messages are sent to it
    async with endpoint:
        sent = [ORDER, Invoice(number=1, paid=Decimal("2.50")), Ping(3)]
        for one in sent:
            await endpoint.send("sales", one)
        await endpoint.send("sales", {"text": "hello"}, headers={TYPES: "notes, Assembly, Version=1.0.0.0"})
        await endpoint.send("sales", b"bytes")
        await settle()
        # Then each handler gets the value of its type
        assert seen == [*sent, ({"text": "hello"}, "notes, Assembly, Version=1.0.0.0"), b"bytes"]


async def test_the_type_and_its_bases_travel_in_a_header(clock: ManualClock) -> None:
    # Given a message of a derived type
    scenario = build(clock)
    async with scenario.endpoint as endpoint:
        await endpoint.transport.setup_infrastructure(["out"])
        await endpoint.send("out", GiftOrderPlaced("17", greeting="hi"))
        await endpoint.send("out", Ping(1), headers={TYPES: "Ping"})
    # Then both names are in its header, the most derived one first; a given header wins
    first, second = await scenario.transport.browse("out", 10)
    assert first.headers[TYPES] == "Contoso.Messages.GiftOrderPlaced;Contoso.Messages.OrderPlaced"
    assert first.headers[Headers.CONTENT_TYPE] == "application/json"
    assert json.loads(first.body) == {"order_id": "17", "lines": [], "greeting": "hi"}
    assert second.headers[TYPES] == "Ping"


async def test_a_handler_of_a_base_type_gets_derived_messages(clock: ManualClock) -> None:
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order)

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", GiftOrderPlaced("17", greeting="hi"))
        await settle()
    assert seen == [OrderPlaced("17")]


async def test_typed_messages_sent_by_handlers_and_later(clock: ManualClock) -> None:
    """Replies and delayed sends carry types as well."""
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(Ping)
    async def ping(value: Ping, context: MessageContext) -> None:
        seen.append((clock.now(), value.sequence))
        if value.sequence == 1:
            context.send("sales", Ping(2), delay=timedelta(seconds=5))

    async with scenario.endpoint as endpoint:
        began = clock.now()
        await endpoint.send("sales", Ping(1))
        await settle()
        await clock.advance(5)
    assert [(at - began, sequence) for at, sequence in seen] == [(timedelta(0), 1), (timedelta(seconds=5), 2)]


@pytest.mark.parametrize(
    ("headers", "body", "text"),
    [
        (headers_of(""), b"{}", "has no NServiceBus.EnclosedMessageTypes header"),
        ({}, b"\xff", "Handlers are registered for 'Contoso.Messages.OrderPlaced'"),
        (headers_of("Contoso.Messages.OrderPlaced"), b"[]", "Expected `object`, got `array`"),
        (headers_of("Contoso.Messages.OrderPlaced"), b"{", "JSON"),
        (headers_of("Contoso.Messages.OrderPlaced"), b"", "JSON"),
        (headers_of("Contoso.Messages.OrderPlaced"), b"\xff\xfe", "JSON"),
        (headers_of("Contoso.Messages.OrderPlaced"), b"[" * 5000, "JSON"),
        (headers_of("Contoso.Messages.OrderPlaced"), b'{"order_id":7}', "Expected `str`, got `int` - at `$.order_id`"),
        (
            headers_of("Contoso.Messages.OrderPlaced") | {Headers.CONTENT_TYPE: "text/xml"},
            b"<OrderPlaced/>",
            "is 'text/xml', and this endpoint reads 'application/json'",
        ),
        (headers_of("Contoso.Messages.OrderPlaced"), b"<OrderPlaced/>", "JSON is malformed"),
        (headers_of(" ;, "), b"{}", "Handlers are registered for 'Contoso.Messages.OrderPlaced'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else repr(value)[:40],
)
async def test_a_message_that_no_typed_handler_can_take_goes_straight_to_the_error_queue(
    clock: ManualClock, headers: dict[str, str], body: bytes, text: str
) -> None:
    # Given an endpoint with a typed handler only
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order)

    async with scenario.endpoint:
        # When a message comes that does not fit
        await put(scenario, headers, body)
        # Then it is in the error queue, without retries, with the reason
        failed = await scenario.only("error")
        assert text in failed.headers[Headers.EXCEPTION_MESSAGE]
        assert (seen, await scenario.pending(), failed.body) == ([], [], body)


@pytest.mark.parametrize(
    ("names", "takes"),
    [
        ("Contoso.Messages.OrderPlaced, Contoso, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null", True),
        ("Derived, Contoso;Contoso.Messages.OrderPlaced, Contoso", True),
        (" ;;, ;Contoso.Messages.OrderPlaced ", True),
        ("contoso.messages.orderplaced", False),
        ("Contoso.Messages.OrderPlaced2", False),
        (";" * 10_000, False),
        ("\x00Contoso.Messages.OrderPlaced", False),
    ],
)
async def test_type_names_of_other_systems(clock: ManualClock, names: str, takes: bool) -> None:
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order)

    async with scenario.endpoint:
        await put(scenario, headers_of(names), b'\xef\xbb\xbf{"order_id":"1"}')
    assert seen == ([OrderPlaced("1")] if takes else [])


async def test_a_typed_dict_is_checked(clock: ManualClock) -> None:
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(Note)
    async def note(value: Note, context: MessageContext) -> None:
        seen.append(value)

    async with scenario.endpoint:
        name = f"{__name__}.Note"
        await put(scenario, headers_of(name), b'{"text":"good"}')
        await put(scenario, headers_of(name), b'{"text":1}')
        assert (seen, await scenario.ids("error")) == ([{"text": "good"}], ["m"])


async def test_each_attempt_gets_a_new_value(clock: ManualClock) -> None:
    """A handler that changes the value and fails is given the message's value again."""
    scenario = build(clock, recoverability=Recoverability(immediate_pause=timedelta(0)))
    seen = []

    @scenario.endpoint.handles(OrderPlaced)
    async def place(order: OrderPlaced, context: MessageContext) -> None:
        seen.append(order.order_id)
        order.order_id = "changed"
        if context.attempt < 3:
            raise ValueError("not yet")

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", OrderPlaced("17"))
        await settle()
    assert seen == ["17"] * 3


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


class Service:
    async def place(self, order: OrderPlaced, context: MessageContext) -> None: ...

    async def __call__(self, order: OrderPlaced, context: MessageContext) -> None: ...


async def place(order: OrderPlaced, context: MessageContext, shop: str = "") -> None: ...


@functools.wraps(place)
async def wrapped(*arguments: Any) -> None:  # noqa: ANN401
    await place(*arguments)


def in_a_thread(order: OrderPlaced, context: MessageContext) -> None: ...


EVERY_KIND = [place, wrapped, in_a_thread, Service().place, Service(), functools.partial(place, shop="a")]


@pytest.mark.parametrize("handle", EVERY_KIND, ids=lambda handle: type(handle).__name__)
@pytest.mark.parametrize("options", [None, {"timeout": timedelta(seconds=5)}])
def test_the_type_of_a_handler_is_that_of_its_annotation(handle: Any, options: dict[str, Any] | None) -> None:  # noqa: ANN401
    """Given a handler of any kind, and `handles` without a type, then it takes the type of its first parameter."""
    endpoint = Endpoint("sales", transport=MemoryTransport())
    register: Any = endpoint.handles if options is None else endpoint.handles(**options)
    assert register(handle) is handle
    assert endpoint.handlers == (handle,)
    with pytest.raises(ConfigurationError, match=r"'Contoso\.Messages\.OrderPlaced' have the handler"):
        endpoint.handles(OrderPlaced)(place)


async def test_handlers_of_the_synchronous_endpoint_are_those_of_its_endpoint() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    twin = SyncEndpoint(endpoint)

    @twin.handles
    def placed(order: OrderPlaced, context: MessageContext) -> None: ...

    @twin.handles(Ping, timeout=timedelta(seconds=5))
    def ping(ping: Ping, context: MessageContext) -> None: ...

    @twin.handler
    def every(message: Message, context: MessageContext) -> None: ...

    assert endpoint.handlers == (placed, ping, every)


def unannotated(order, context) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001
async def of_anything(order: Any, context: MessageContext) -> None: ...  # noqa: ANN401
async def of_every_object(order: object, context: MessageContext) -> None: ...
async def of_messages(message: Message, context: MessageContext) -> None: ...
async def of_a_dict(order: dict[str, int], context: MessageContext) -> None: ...
async def of_several(order: OrderPlaced | Ping, context: MessageContext) -> None: ...
async def of_an_unknown(order: "Unknown", context: MessageContext) -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037
async def of_damaged_text(order: "a[", context: MessageContext) -> None: ...  # type: ignore[valid-type]  # noqa: F722
async def of_a_number(order: "typing.Literal[3]", context: MessageContext) -> None: ...  # noqa: UP037
async def of_a_plain_class(order: Plain, context: MessageContext) -> None: ...


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (unannotated, r"does not say which messages it takes: write `async def .*@endpoint\.handles\(OrderPlaced\)"),
        (of_anything, r"takes Any, which says nothing"),
        (of_every_object, r"takes object, which says nothing"),
        (of_messages, r"every message is: write @endpoint\.handler above it"),
        (of_a_dict, r"takes dict\[str, int\], which is sent without the name of a type: write @endpoint\.handler"),
        (of_several, r"several types: write @endpoint\.handles\(OrderPlaced\) and @endpoint\.handles\(Ping\)"),
        (of_an_unknown, r"'Unknown' .*cannot be looked up .*not under `if TYPE_CHECKING:`.*handles\(Unknown\)"),
        (of_damaged_text, r"cannot be looked up"),
        (of_a_number, r"takes Literal\[3\], which is no type"),
        (of_a_plain_class, r"cannot be read as Plain, which is a plain class: make the class a dataclass"),
        (len, "cannot be called with a message and a context|does not say which messages"),
    ],
)
def test_a_handler_that_names_no_type_of_messages_is_refused(handle: Any, text: str) -> None:  # noqa: ANN401
    """Given `@endpoint.handles` over a handler whose annotation is none, then the error says how to write it."""
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with pytest.raises(ConfigurationError, match=text):
        endpoint.handles(handle)
    assert endpoint.handlers == ()


async def of_a_ping(ping: Ping, context: MessageContext) -> None: ...
async def of_its_base(order: OrderPlaced, context: MessageContext) -> None: ...
async def of_a_mapping(note: Mapping[str, str], context: MessageContext) -> None: ...
async def of_a_note(note: Note, context: MessageContext) -> None: ...
async def of_an_optional(order: OrderPlaced | None, context: object) -> None: ...
async def swapped(context: MessageContext, order: OrderPlaced) -> None: ...
async def of_an_unknown_context(order: OrderPlaced, context: "Unknown") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037


@pytest.mark.parametrize(
    ("kind", "handle", "text"),
    [
        (
            OrderPlaced,
            of_a_ping,
            r"of_a_ping is annotated with Ping, and gets OrderPlaced: write @endpoint\.handles\(Ping\)",
        ),
        (OrderPlaced, of_messages, r"annotated with Message, and gets OrderPlaced: write @endpoint\.handler,"),
        (OrderPlaced, of_a_mapping, r"annotated with .*Mapping\[str, str\], and gets OrderPlaced"),
        (OrderPlaced, of_a_note, "annotated with Note, and gets OrderPlaced"),
        (OrderPlaced, swapped, "annotated with MessageContext, and gets OrderPlaced"),
        (GiftOrderPlaced, of_a_ping, "gets GiftOrderPlaced"),
        (
            "Contoso.Ping",
            of_a_ping,
            r"gets what messages of type 'Contoso.Ping' have .*write @endpoint\.handles\(Ping\)",
        ),
        (Note, of_a_ping, "gets Note"),
        (Plain, of_every_object, "make the class a dataclass"),
        (dict, of_every_object, "sent without the name of a type"),
        (OrderPlaced | Ping, of_every_object, "several types"),
        (17, of_every_object, "takes 17, which is no type"),
        (None, of_a_ping, None),
        (GiftOrderPlaced, of_its_base, None),
        (Note, of_a_mapping, None),
        (Note, of_a_note, None),
        ("Contoso.Note", of_a_mapping, None),
        (OrderPlaced, of_an_optional, None),
        (OrderPlaced, of_an_unknown, None),
        (OrderPlaced, of_an_unknown_context, None),
        (OrderPlaced, unannotated, None),
    ],
)
def test_an_annotation_of_another_type_is_refused(kind: Any, handle: Any, text: str | None) -> None:  # noqa: ANN401
    """Given a type and a handler that is annotated with another, then it is refused, and where it fits it is not."""
    endpoint = Endpoint("sales", transport=MemoryTransport())
    if text is None:
        assert endpoint.handles(kind)(handle) is handle
        return
    with pytest.raises(ConfigurationError, match=text):
        endpoint.handles(kind)(handle)
    assert endpoint.handlers == ()


def test_a_handler_of_every_message_takes_messages() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with pytest.raises(ConfigurationError, match=r"with Ping, and gets Message: write @endpoint\.handles\(Ping\)"):
        endpoint.handler(of_a_ping)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"second parameter .*OrderPlaced, and gets a MessageContext"):
        endpoint.handler(_with_another_context)  # type: ignore[arg-type]
    assert endpoint.handlers == ()


async def _with_another_context(message: Message, context: OrderPlaced) -> None: ...


def test_a_serializer_of_the_users_decides_which_types_it_reads() -> None:
    """Given a serializer that reads plain classes, then a handler of one is taken."""
    endpoint = Endpoint("sales", transport=MemoryTransport(), serializer=Pickled())
    assert endpoint.handles(of_a_plain_class) is of_a_plain_class


class Pickled:
    content_type = "application/x-pickled"

    def dumps(self, value: Any) -> bytes:  # noqa: ANN401
        raise NotImplementedError

    def loads(self, data: bytes, kind: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError


def test_registrations_that_cannot_work_are_refused() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())

    async def good(order: object, context: MessageContext) -> None: ...

    async def bad(order: object) -> None: ...

    assert endpoint.handles(OrderPlaced)(good) is good
    with pytest.raises(ConfigurationError, match=r"'Contoso\.Messages\.OrderPlaced' have the handler .*good already"):
        endpoint.handles("Contoso.Messages.OrderPlaced")(good)
    with pytest.raises(ConfigurationError, match=r"bad.*cannot be called with a message and a context"):
        endpoint.handles(Ping)(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="send_only"):
        Endpoint("sales", transport=MemoryTransport(), send_only=True).handles(Ping)(good)
    for name in ("", "a,b", "a;b", "a\n", "x" * 201, None):
        with pytest.raises(ConfigurationError, match="message type"):
            message_type(name)  # type: ignore[arg-type]


class Reversed:
    """A serializer that other systems would not understand."""

    content_type = "application/x-reversed"

    def dumps(self, value: Any) -> bytes:  # noqa: ANN401
        return JsonSerializer().dumps(value)[::-1]

    def loads(self, data: bytes, kind: Any) -> Any:  # noqa: ANN401
        if data == b"boom":
            raise RuntimeError("the serializer fails")
        return JsonSerializer().loads(data[::-1], kind)


async def test_a_serializer_of_the_users(clock: ManualClock) -> None:
    scenario, seen = build(clock, serializer=Reversed()), []
    assert isinstance(Reversed(), Serializer)

    @scenario.endpoint.handles(Ping)
    async def ping(value: Ping, context: MessageContext) -> None:
        seen.append(value)

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", Ping(7))
        await put(scenario, {TYPES: f"{__name__}.Ping", Headers.CONTENT_TYPE: "application/x-reversed"}, b"boom")
        assert seen == [Ping(7)]
        failed = await scenario.only("error")
    assert "the serializer fails" in failed.headers[Headers.EXCEPTION_MESSAGE]


def test_errors_name_the_key() -> None:
    serializer = JsonSerializer()
    with pytest.raises(InvalidMessage, match=r"^body\.lines\[1\], of type object, cannot be written as JSON"):
        serializer.dumps(OrderPlaced("1", [LINE, object()]))  # type: ignore[list-item]
    with pytest.raises(InvalidMessage, match=r"^body\['a'\]\[0\], of type float, "):
        serializer.dumps({"a": [float("nan")]})
    with pytest.raises(InvalidPayload, match=r"at `\$\.lines\[0\]\.price`"):
        serializer.loads(b'{"order_id":"1","lines":[{"price":"x"}]}', OrderPlaced)
    with pytest.raises(InvalidPayload, match="number"):
        serializer.loads(b'{"number":"x","paid":1}', Invoice)


def test_values_survive_json() -> None:
    serializer = JsonSerializer()
    assert serializer.loads(serializer.dumps(ORDER), OrderPlaced) == ORDER


async def test_functions_run_in_threads_with_the_same_context(clock: ManualClock) -> None:
    # Given a handler that is a plain function
    scenario, threads = build(clock, concurrency=3), []
    together = threading.Barrier(3, timeout=30)
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @scenario.endpoint.handles(Ping)
    def ping(value: Ping, context: MessageContext) -> None:
        threads.append(threading.current_thread())
        together.wait()
        context.send("out", f"answer to {value.sequence}")
        if len(threads) == 3:
            loop.call_soon_threadsafe(done.set)

    await scenario.transport.setup_infrastructure(["out"])
    async with scenario.endpoint as endpoint:
        # When three messages come
        for sequence in range(3):
            await endpoint.send("sales", Ping(sequence))
        async with asyncio.timeout(30):
            await done.wait()
    # Then they were handled at once, in other threads, and their sends have left
    assert threading.current_thread() not in threads
    assert len(set(threads)) == 3
    bodies = {message.text for message in await scenario.transport.browse("out", 10)}
    assert bodies == {"answer to 0", "answer to 1", "answer to 2"}


async def test_a_function_that_fails_is_retried(clock: ManualClock) -> None:
    scenario, attempts = build(clock, recoverability=Recoverability(immediate_pause=timedelta(0))), []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @scenario.endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        attempts.append(context.attempt)
        if context.attempt < 3:
            raise ValueError("not yet")
        loop.call_soon_threadsafe(done.set)

    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"")
        async with asyncio.timeout(30):
            await done.wait()
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(("seconds", "logged"), [(0.9, []), (1.25, ["slow has blocked the event loop for 1.2 s"])])
async def test_a_coroutine_that_blocks_the_loop_is_logged(
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    logged: list[str],
) -> None:
    # Given a handler whose second step takes so long, as its own clock has it
    now = [100.0]
    monkeypatch.setattr("delayline.receiving.execution.time", SimpleNamespace(monotonic=lambda: now[0]))
    scenario = build(clock)

    @scenario.endpoint.handler
    async def slow(message: Message, context: MessageContext) -> None:
        await asyncio.sleep(0)
        now[0] += seconds

    with caplog.at_level(logging.WARNING):
        async with scenario.endpoint as endpoint:
            await endpoint.send("sales", b"")
            await settle()
    # Then that is logged with its name and its time, if that was long
    texts = [record.getMessage() for record in caplog.records if vars(record).get("event") == Event.HANDLER_BLOCKED]
    assert [text.partition(": make it")[0].rpartition("<locals>.")[2] for text in texts] == logged


class Unusual(BaseException):
    """Neither an Exception nor one of Python's own."""


UNUSUAL = [SystemExit(3), asyncio.CancelledError(), Unusual("odd")]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("coroutine", error) for error in UNUSUAL] + [("function", error) for error in (*UNUSUAL, KeyboardInterrupt())],
    ids=repr,
)
async def test_whatever_a_handler_raises_is_its_failure(clock: ManualClock, kind: str, error: BaseException) -> None:
    # Given a handler that raises what would end the event loop or the task
    scenario = build(clock, recoverability=Recoverability(immediate_retries=1, delayed_retries=0))
    attempts = []

    async def coroutine(message: Message, context: MessageContext) -> None:
        attempts.append(context.attempt)
        raise error

    def function(message: Message, context: MessageContext) -> None:
        attempts.append(context.attempt)
        raise error

    scenario.endpoint.handler(coroutine if kind == "coroutine" else function)
    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="m")
        # When its attempts are used up
        await eventually_async(functools.partial(scenario.ids, "error"))
        # Then the message is in the error queue, and the exception is named
        failed = await scenario.only("error")
    assert attempts == [1, 2]
    assert repr(error) in failed.headers[Headers.EXCEPTION_MESSAGE]


async def test_a_task_that_outlives_its_handler_cannot_send(clock: ManualClock) -> None:
    # Given a handler that leaves a task behind
    scenario, left, go_on = build(clock), [], asyncio.Event()

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        async def late() -> None:
            await go_on.wait()
            await context.send("out", b"")

        left.append(asyncio.create_task(late()))

    await scenario.transport.setup_infrastructure(["out"])
    async with scenario.endpoint as endpoint:
        await endpoint.send("sales", b"", message_id="m")
        await settle()
        # When the task sends after the handler's end
        go_on.set()
        # Then it fails, and the message is handled
        with pytest.raises(InvalidMessage, match=r"handler of message 'm' has ended: this message would be lost"):
            await left[0]
        assert (await scenario.ids("error"), await scenario.ids("out")) == ([], [])


@dataclass
class Node:
    children: list[Node] = field(default_factory=list)


async def test_recursive_types(clock: ManualClock) -> None:
    # Given a handler of a type that contains itself
    scenario, seen = build(clock), []

    @scenario.endpoint.handles(Node)
    async def handle(node: Node, context: MessageContext) -> None:
        seen.append(node)

    tree, endless = Node([Node([Node()]), Node()]), Node()
    endless.children.append(endless)
    async with scenario.endpoint as endpoint:
        # Then a tree arrives as it was sent
        await endpoint.send("sales", tree)
        await settle()
        assert seen == [tree]
        # And one that contains itself is refused by the send
        with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
            await endpoint.send("sales", endless)
        # And one that is nested too deep goes to the error queue
        await put(scenario, headers_of(f"{__name__}.Node"), b'{"children":[' * 100_000 + b"]}" * 100_000)
        failed = await scenario.only("error")
    assert "cannot be read as" in failed.headers[Headers.EXCEPTION_MESSAGE]
    assert seen == [tree]


def test_two_types_of_the_same_name_are_refused() -> None:
    # Given a handler of a type
    endpoint = Endpoint("sales", transport=MemoryTransport())

    async def first(value: object, context: MessageContext) -> None: ...

    async def second(value: object, context: MessageContext) -> None: ...

    endpoint.handles(OrderPlaced)(first)

    @message_type("Contoso.Messages.OrderPlaced")
    @dataclass
    class Other:
        number: int

    # Then another type with its name is refused, and the error names the handler that there is
    with pytest.raises(ConfigurationError, match=r"'Contoso\.Messages\.OrderPlaced' have the handler .*first already"):
        endpoint.handles(Other)(second)


class Broken:
    """A serializer that cannot write."""

    content_type = "application/x-broken"

    def dumps(self, value: Any) -> bytes:  # noqa: ANN401
        raise LookupError("the schema registry does not answer")

    def loads(self, data: bytes, kind: Any) -> Any:  # noqa: ANN401
        raise LookupError("the schema registry does not answer")


async def test_a_serializer_that_fails_fails_the_send_or_the_handler(clock: ManualClock) -> None:
    scenario = build(clock, serializer=Broken(), recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    @scenario.endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await context.send("out", Ping(1))

    async with scenario.endpoint as endpoint:
        with pytest.raises(InvalidMessage, match="the schema registry does not answer"):
            await endpoint.send("sales", Ping(1))
        await endpoint.send("sales", b"bytes need no serializer")
        await settle()
        failed = await scenario.only("error")
    assert "the schema registry does not answer" in failed.headers[Headers.EXCEPTION_MESSAGE]
