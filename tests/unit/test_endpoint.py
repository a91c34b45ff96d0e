"""The endpoint: settings, lifecycle, sends, critical errors."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.conftest import MemoryStore, build

from delayline import (
    ConfigurationError,
    Endpoint,
    Guarantee,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Message,
    MessageContext,
    NotStarted,
    QueueNotFound,
    Recoverability,
    StoredDelivery,
    SyncEndpoint,
    TransactionMode,
)
from delayline.errors import UnsupportedTransactionMode
from delayline.events import Event
from delayline.spi import TransportOperation
from delayline.testing import FaultyTransport
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from pathlib import Path

    from delayline.testing.clock import ManualClock

BOOM = RuntimeError("boom")


async def nothing(message: Message, context: MessageContext) -> None:
    """Handle nothing."""


async def test_it_starts_once_and_can_start_again_after_a_stop() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    await endpoint.start()
    with pytest.raises(ConfigurationError, match="'sales' is started already: start it once"):
        await endpoint.start()
    await asyncio.gather(endpoint.stop(), endpoint.stop())
    await endpoint.stop()
    await endpoint.wait_stopped()
    async with endpoint:
        await endpoint.send("sales", b"again")


def test_an_endpoint_at_a_url_has_its_queues_and_its_delayed_messages_there(tmp_path: Path) -> None:
    endpoint = Endpoint("sales", url=f"sqlite:///{tmp_path}/sales.db")
    assert endpoint.guarantee is Guarantee.EXACTLY_ONCE
    store = MemoryDelayedMessageStore()
    assert Endpoint("sales", url="memory:", delayed_delivery=store).store is store


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "endpoint 'sales' has no queues: pass url="),
        ({"url": "sales.db"}, "no transport for the URL 'sales.db'. The supported schemes are .*sqlite:"),
        ({"url": 5}, "url= is a int: pass a text"),
        ({"url": ""}, "no transport for the URL ''"),
        ({"url": "sqlite:///x.db", "transport": MemoryTransport()}, "url= and transport= exclude each other"),
    ],
)
def test_a_url_that_opens_nothing_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Endpoint("sales", **given)


@pytest.mark.parametrize("others", [{}, {"transport": MemoryTransport()}])
def test_a_refused_url_shows_no_password(others: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Endpoint("sales", url="mongodb://shop:secret@server/shop", **others)
    assert "mongodb://" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_wait_stopped_returns_after_a_stop() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    await endpoint.start()
    waiting = asyncio.create_task(endpoint.wait_stopped())
    await settle()
    assert not waiting.done()
    await endpoint.stop()
    await waiting


@pytest.mark.parametrize("part", ["setup", "store", "receiver"])
async def test_a_failing_start_is_undone(clock: ManualClock, part: str) -> None:
    scenario = build(clock)
    scenario.endpoint.handler(nothing)

    async def fail(*_: object) -> Any:  # noqa: ANN401
        raise BOOM

    target: Any = scenario.store if part == "store" else scenario.transport
    name = {"setup": "setup_infrastructure", "store": "initialize", "receiver": "receiver"}[part]
    setattr(target, name, fail)
    with pytest.raises(RuntimeError, match="boom"):
        await scenario.endpoint.start()
    assert scenario.faults.calls("stop") == 1
    with pytest.raises(NotStarted):
        await scenario.endpoint.send("sales", b"")
    delattr(target, name)
    async with scenario.endpoint:
        await scenario.endpoint.send("sales", b"", delay=timedelta(1))


async def test_a_send_needs_a_started_endpoint() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with pytest.raises(NotStarted, match="use `async with endpoint:`"):
        await endpoint.send("sales", b"")


async def test_a_delay_needs_delayed_delivery() -> None:
    async with Endpoint("sales", transport=MemoryTransport()) as endpoint:
        with pytest.raises(
            ConfigurationError, match=r"pass delayed_delivery=StoredDelivery\(\.\.\.\), or DelayLevelDelivery\(\) where"
        ):
            await endpoint.send("sales", b"", delay=timedelta(1))


async def test_setup_creates_queues_and_needs_no_start() -> None:
    transport = FaultyTransport(MemoryTransport())
    endpoint = Endpoint("sales", transport=transport, error_queue="broken", setup_infrastructure=False)
    with pytest.raises(QueueNotFound):
        await transport.count("sales")
    await endpoint.setup()
    assert [await transport.count(queue) for queue in ("sales", "broken")] == [0, 0]
    assert transport.calls("stop") == 1


async def test_a_send_only_endpoint_has_no_queue_and_no_handlers() -> None:
    transport = MemoryTransport()
    endpoint = Endpoint("sales", transport=transport, send_only=True)
    with pytest.raises(ConfigurationError, match="is send_only"):
        endpoint.handler(nothing)
    async with endpoint:
        assert await transport.count("error") == 0
        with pytest.raises(QueueNotFound):
            await transport.count("sales")


def test_handlers_are_functions_in_order() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())

    @endpoint.handler()
    def plain(message: Message, context: MessageContext) -> None:
        """Run in a thread."""

    with pytest.raises(ConfigurationError, match="a handler is a function, not 7"):
        endpoint.handler(7)  # type: ignore[call-overload]
    assert endpoint.handler(nothing) is nothing
    assert endpoint.handlers == (plain, nothing)


async def test_a_handler_registered_after_the_start_is_refused() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    async with endpoint:
        with pytest.raises(ConfigurationError, match=r"'sales' is started already: handler nothing .*before start\(\)"):
            endpoint.handler(nothing)
    endpoint.handler(nothing)
    assert endpoint.handlers == (nothing,)


async def only_the_message(message: Message) -> None:
    """Lack the context."""


async def one_too_many(message: Message, context: MessageContext, more: str) -> None:
    """Ask for more than there is."""


async def by_name(*, message: Message, context: MessageContext) -> None:
    """Take nothing by position."""


@pytest.mark.parametrize("handle", [only_the_message, one_too_many, by_name])
def test_a_handler_with_a_wrong_signature_is_refused(handle: Any) -> None:  # noqa: ANN401
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with pytest.raises(
        ConfigurationError, match=r"async def handle\(message: Message, context: MessageContext\)"
    ) as raised:
        endpoint.handler(handle)
    assert handle.__name__ in str(raised.value)
    assert endpoint.handlers == ()


async def with_a_default(message: Message, context: MessageContext, more: str = "") -> None:
    """Accept any settings."""


async def anything(*arguments: object) -> None:
    """Handle any message."""


class Handlers:
    async def handle(self, message: Message, context: MessageContext) -> None:
        """Be a method."""


@pytest.mark.parametrize("handle", [with_a_default, anything, Handlers().handle, partial(one_too_many, more="")])
def test_a_handler_that_takes_a_message_and_a_context_is_registered(handle: Any) -> None:  # noqa: ANN401
    endpoint = Endpoint("sales", transport=MemoryTransport())
    assert endpoint.handler(handle) is handle


@pytest.mark.parametrize("number", [0, 3])
async def test_an_endpoint_without_handlers_is_warned_of(caplog: pytest.LogCaptureFixture, number: int) -> None:
    transport = MemoryTransport()
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([TransportOperation(Message(str(one), {}, b""), "sales") for one in range(number)])
    async with Endpoint("sales", transport=transport):
        pass
    warned = [one.getMessage() for one in caplog.records if getattr(one, "event", "") == Event.NO_HANDLERS]
    there = ": 3 messages stay in its queue" if number else ""
    assert warned == [
        f"endpoint sales has no handlers, and receives nothing{there}. Register handlers with @endpoint.handles or "
        "@endpoint.handler before start(), or pass send_only=True"
    ]


async def test_a_send_only_endpoint_needs_no_handlers(caplog: pytest.LogCaptureFixture) -> None:
    async with Endpoint("sales", transport=MemoryTransport(), send_only=True):
        pass
    assert not [one for one in caplog.records if getattr(one, "event", "") == Event.NO_HANDLERS]


@pytest.mark.parametrize(
    ("argument", "given", "text"),
    [
        ("transport", "sqlite:///shop.db", r"transport= is a text: pass .*transport=SqlTransport\(url\), or url="),
        ("transport", "postgresql://shop:secret@db/shop", r"transport= is a text: pass"),
        ("transport", MemoryTransport, r"transport= is the class MemoryTransport, not an instance of it: write Mem"),
        ("transport", 17, r"transport= is an int: pass for example transport=SqlTransport\(url\)"),
        (
            "delayed_delivery",
            "sqlite:///shop.db",
            r"delayed_delivery= is a text: pass .*=SqlDelayedMessageStore\(url\)",
        ),
        (
            "delayed_delivery",
            MemoryDelayedMessageStore,
            r"delayed_delivery= is the class MemoryDelayedMessageStore, not",
        ),
        ("draining", StoredDelivery, r"draining= is the class StoredDelivery, not an instance of it"),
    ],
)
def test_a_part_that_is_none_is_refused(argument: str, given: Any, text: str) -> None:  # noqa: ANN401
    """Given a text, a class or another value for a part, then the error says what to pass, and no password."""
    parts: dict[str, Any] = {"transport": MemoryTransport(), argument: given}
    with pytest.raises(ConfigurationError, match=text) as found:
        Endpoint("sales", **parts)
    assert "secret" not in str(found.value)


async def test_an_endpoint_is_no_synchronous_context_manager() -> None:
    endpoint: Any = Endpoint("sales", transport=MemoryTransport())
    text = r"'sales' is used with `async with`.*with SyncEndpoint\(endpoint\)"
    with pytest.raises(ConfigurationError, match=text), endpoint:
        pass
    assert not endpoint.started
    twin: Any = SyncEndpoint(endpoint)
    with pytest.raises(ConfigurationError, match="in coroutines write `async with endpoint:`"):
        async with twin:
            pass
    assert not endpoint.started


@pytest.mark.parametrize("stops", [True, False])
def test_an_endpoint_that_was_not_stopped_is_warned_of(caplog: pytest.LogCaptureFixture, *, stops: bool) -> None:
    """Given a program that starts an endpoint and ends, then the log says that it was not stopped."""

    async def program() -> None:
        endpoint = Endpoint("sales", transport=MemoryTransport())
        endpoint.handler(nothing)
        await endpoint.start()
        await endpoint.send("sales", b"")
        if stops:
            await endpoint.stop()

    asyncio.run(program())
    warned = [one.getMessage() for one in caplog.records if getattr(one, "event", "") == Event.ENDPOINT_NOT_STOPPED]
    assert len(warned) == (not stops)
    assert all("sales was not stopped before its event loop ended" in text for text in warned)


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)])
async def test_a_destination_that_does_not_exist_is_answered_with_similar_ones(delay: timedelta | None) -> None:
    endpoint = Endpoint("billing", transport=MemoryTransport(), delayed_delivery=MemoryDelayedMessageStore())
    async with endpoint:
        for _ in range(2):
            with pytest.raises(QueueNotFound, match=r"'biling' does not exist\. Did you mean 'billing'\?"):
                await endpoint.send("biling", b"", delay=delay)
        with pytest.raises(QueueNotFound, match=r"'other' does not exist\. Start"):
            await endpoint.send("other", b"", delay=delay)


async def test_a_store_stands_for_a_stored_delivery(clock: ManualClock) -> None:
    store = MemoryDelayedMessageStore()
    endpoint = Endpoint("sales", transport=MemoryTransport(), delayed_delivery=store, clock=clock)
    assert isinstance(endpoint.delayed_delivery, StoredDelivery)
    assert endpoint.guarantee is Guarantee.EXACTLY_ONCE
    async with endpoint:
        await endpoint.send("sales", b"", delay=timedelta(seconds=1), message_id="m")
        assert [one.id for one in await endpoint.delayed.pending()] == ["m"]


@pytest.mark.parametrize("setting", ["delayed_delivery", "draining"])
def test_objects_that_are_neither_delivery_nor_store_are_refused(setting: str) -> None:
    wrong: Any = object()
    with pytest.raises(ConfigurationError, match=rf"{setting}= is a \w+, neither .*StoredDelivery\(store\)"):
        Endpoint("sales", transport=MemoryTransport(), **{setting: wrong})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number of 1 or more, not 0"),
        ({"concurrency": 1.5}, "not 1.5"),
        ({"transaction_mode": 3}, "must be one of TransactionMode.NONE, .*; not 3"),
        ({"transaction_mode": "NONE"}, "not 'NONE'"),
        ({"error_queue": ""}, "1 to 200 characters"),
        ({"error_queue": " error"}, "remove them"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Endpoint("sales", transport=MemoryTransport(), **settings)


def test_the_default_mode_is_the_strongest_of_the_pair() -> None:
    shared = Endpoint("a", transport=MemoryTransport(), delayed_delivery=StoredDelivery(MemoryDelayedMessageStore()))
    apart = Endpoint("a", transport=MemoryTransport(), delayed_delivery=StoredDelivery(MemoryStore(shared=False)))
    assert (shared.transaction_mode, shared.guarantee) == (
        TransactionMode.TRANSACTION_SCOPE,
        Guarantee.EXACTLY_ONCE,
    )
    assert apart.transaction_mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    with pytest.raises(UnsupportedTransactionMode, match="Keep both in the same database"):
        build_apart(TransactionMode.TRANSACTION_SCOPE)


def build_apart(mode: TransactionMode, recoverability: Recoverability | None = None) -> Endpoint:
    return Endpoint(
        "a",
        transport=MemoryTransport(),
        delayed_delivery=StoredDelivery(MemoryStore(shared=False)),
        transaction_mode=mode,
        recoverability=recoverability,
    )


def test_delayed_retries_are_adapted_where_defaulted_and_refused_where_asked_for() -> None:
    none = TransactionMode.NONE
    adapted = build_apart(none).recoverability
    assert (adapted.immediate_retries, adapted.delayed_retries) == (0, 0)
    with pytest.raises(ConfigurationError, match=r"when running with TransactionMode.NONE.*delayed_retries=0"):
        build_apart(none, Recoverability(delayed_retries=1))
    assert build_apart(none, Recoverability(delayed_retries=0)).recoverability.immediate_retries == 0
    without = Endpoint("a", transport=MemoryTransport())
    assert (without.recoverability.immediate_retries, without.recoverability.delayed_retries) == (5, 0)
    with pytest.raises(ConfigurationError, match=r"without delayed delivery.*pass delayed_delivery"):
        Endpoint("a", transport=MemoryTransport(), recoverability=Recoverability(delayed_retries=1))
    fitted = Endpoint("a", transport=MemoryTransport(), recoverability=Recoverability(immediate_retries=1))
    assert (fitted.recoverability.immediate_retries, fitted.recoverability.delayed_retries) == (1, 0)


async def test_a_critical_error_stops_the_endpoint_by_default(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    await endpoint.start()
    endpoint._critical_error("The roof is on fire", BOOM)
    await endpoint.wait_stopped()
    assert "sales: The roof is on fire: boom" in caplog.text


async def test_a_critical_error_calls_the_hosts_action_and_logs_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[tuple[str, str, Exception]] = []

    async def act(endpoint: Endpoint, text: str, error: Exception) -> None:
        calls.append((endpoint.name, text, error))
        raise LookupError("no one home")

    async with Endpoint("sales", transport=MemoryTransport(), on_critical_error=act) as endpoint:
        endpoint._critical_error("fire", BOOM)
        await settle()
        assert calls == [("sales", "fire", BOOM)]
        await endpoint.send("sales", b"still here")
    assert "the critical error action of endpoint sales failed" in caplog.text


async def test_pending_messages_can_be_managed_if_the_store_supports_it(clock: ManualClock) -> None:
    scenario = build(clock)
    async with scenario.endpoint:
        await scenario.endpoint.send("sales", b"", message_id="m", delay=timedelta(1))
        assert [message.id for message in await scenario.endpoint.delayed.pending()] == ["m"]
    with pytest.raises(ConfigurationError, match="FaultyStore cannot list, cancel or reschedule"):
        _ = build(clock, verbs_only=True).endpoint.delayed
