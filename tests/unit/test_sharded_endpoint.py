"""An endpoint over two files, each a shard: its pollers, receivers and handlers, and a shard that does not answer."""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import eventually_async

from delayline import BackendUnavailable, ConfigurationError, Endpoint, Message, MessageContext, StoredDelivery
from delayline.delayed.fairness import FairBy
from delayline.delayed.sharded import ShardedDelivery
from delayline.delayed.store import Outcome
from delayline.events import Event
from delayline.shards import OUT_OF_REACH, EachShard, Shard, ShardMap
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.shards import ShardedDelayedMessageStore, ShardedTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAY = timedelta(days=1)
SOON = timedelta(milliseconds=50)


def map_of(tmp_path: Path, *others: Shard) -> ShardMap:
    return ShardMap(1, (Shard("a", f"sqlite:///{tmp_path / 'a.db'}"), *others))


def two_files(tmp_path: Path) -> ShardMap:
    return map_of(tmp_path, Shard("b", f"sqlite:///{tmp_path / 'b.db'}"))


def endpoint_over(shards: ShardMap) -> Endpoint:
    store = ShardedDelayedMessageStore(shards)
    return Endpoint("sales", transport=ShardedTransport(shards), delayed_delivery=store)


def id_in(shards: ShardMap, name: str) -> str:
    return next(made for number in range(1000) if shards.shard_of(made := f"m{number}") == name)


def test_each_shard_has_the_settings_that_the_delivery_was_given(tmp_path: Path) -> None:
    # Given settings of which none has its default
    others: dict[type, Callable[[Any], Any]] = {
        bool: lambda value: not value,
        int: lambda value: value + 7,
        timedelta: lambda value: value + DAY,
    }
    defaults = {name: setting.default for name, setting in signature(StoredDelivery).parameters.items()}
    del defaults["store"]
    given = {name: others[type(value)](value) for name, value in defaults.items() if value is not None}
    given["fair_by"] = "header:Tenant"
    assert given.keys() == defaults.keys()
    # When a delivery has a store with shards
    delivery = StoredDelivery(ShardedDelayedMessageStore(two_files(tmp_path)), **given)
    # Then the part of each shard has the same ones
    assert isinstance(delivery, ShardedDelivery)
    whole = {name: getattr(delivery, name) for name in given}
    assert whole == given | {"fair_by": FairBy.of("header:Tenant")}
    assert [{name: getattr(part, name) for name in given} for part in delivery.parts.values()] == [whole, whole]


async def test_handlers_change_what_waits_in_their_shard_and_in_others(tmp_path: Path) -> None:
    # Given messages that wait in both shards
    shards, handled = two_files(tmp_path), Counter[str]()
    first, others = id_in(shards, "a"), [f"waits-{number}" for number in range(8)]
    endpoint = endpoint_over(shards)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1
        if message.id == first:
            for other in others[:4]:
                await context.cancel(other)
            await context.reschedule(others[4], datetime.now(UTC) + 2 * DAY)
            await context.send("sales", b"", message_id="sent", delay=SOON)

    async with endpoint:
        await endpoint.send_many([])
        for message_id in others:
            await endpoint.send("sales", b"", message_id=message_id, delay=DAY)
        assert {shards.shard_of(message_id) for message_id in others} == {"a", "b"}
        # When a handler cancels half of them and sends another
        await endpoint.send("sales", b"", message_id=first, delay=SOON)
        await eventually_async(lambda: set(handled) == {first, "sent"})
        # Then the others wait, and what it has sent is handled
        pending = await endpoint.delayed.pending()
        assert {message.id for message in pending} == set(others[4:])
        assert max(pending, key=lambda message: message.due).id == others[4]
        counts = await endpoint.delayed.count_by_due(timedelta(days=30))
        assert sum(count.count for count in counts) == 4
        assert await endpoint.delayed.cancel(others[7]) is Outcome.DONE
        assert endpoint.measures()[OUT_OF_REACH] == 0
        kept = await endpoint.send("sales", b"", message_id=others[5], delay=DAY, on_conflict="keep")
        assert kept == others[5]
        replaced = await endpoint.send("sales", b"", message_id=others[6], delay=SOON, on_conflict="replace")
        assert replaced == others[6]
        await eventually_async(lambda: handled[others[6]] == 1)
    assert max(handled.values()) == 1


async def test_a_shard_that_does_not_answer_stops_its_own_messages_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = map_of(tmp_path, Shard("b", "postgresql://nobody@127.0.0.1:9/none?server_timeout=2"))
    handled, endpoint = Counter[str](), endpoint_over(shards)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1

    async with endpoint:
        with pytest.raises(BackendUnavailable, match="shard 'b' is out of reach"):
            await endpoint.send("sales", b"", message_id=id_in(shards, "b"), delay=SOON)
        await endpoint.send("sales", b"", message_id=id_in(shards, "a"), delay=SOON)
        await eventually_async(lambda: handled[id_in(shards, "a")] == 1)
        assert endpoint.measures()[OUT_OF_REACH] == 1
    events = Counter(getattr(record, "event", None) for record in caplog.records if record.levelno == logging.ERROR)
    assert set(events) == {Event.SHARD_OUT_OF_REACH}


async def test_a_shard_is_opened_once_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Counter[str]()

    async def always() -> None:
        attempts["always"] += 1

    async def later() -> None:
        attempts["later"] += 1
        if attempts["later"] == 1:
            raise BackendUnavailable("down")
        if attempts["later"] == 2:
            raise ConfigurationError("wrong")

    opening = EachShard("its queues")
    with caplog.at_level(logging.INFO):
        await opening.open({"a": always, "b": later})
        assert {*opening.out_of_reach} == {"b"}
        await eventually_async(lambda: not opening.out_of_reach)
    assert attempts == {"always": 1, "later": 3}
    assert [getattr(record, "event", None) for record in caplog.records] == [
        Event.SHARD_OUT_OF_REACH,
        Event.SHARD_OUT_OF_REACH,
        Event.SHARD_REACHED,
    ]
    await opening.stop()


async def test_queues_and_delayed_messages_need_the_same_map(tmp_path: Path) -> None:
    shards = two_files(tmp_path)
    with pytest.raises(ConfigurationError, match="give transport and store the same map"):
        Endpoint(
            "sales",
            transport=ShardedTransport(map_of(tmp_path)),
            delayed_delivery=ShardedDelayedMessageStore(shards),
        )


async def test_queues_alone_can_be_sharded(tmp_path: Path) -> None:
    """Delayed messages wait in one database, and go to the shards when they are due."""
    shards, handled = two_files(tmp_path), Counter[str]()
    endpoint = Endpoint(
        "sales",
        transport=ShardedTransport(shards),
        delayed_delivery=SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'store.db'}"),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] += 1

    ids = [id_in(shards, name) for name in ("a", "b")]
    async with endpoint:
        for message_id in ids:
            await endpoint.send("sales", b"", message_id=message_id, delay=SOON)
        await eventually_async(lambda: set(handled) == set(ids))
        assert isinstance(endpoint.transport, ShardedTransport)
        assert {*endpoint.transport.parts} == {"a", "b"}
        assert isinstance(endpoint.transport.parts["a"], SqlTransport)
        await endpoint.transport.dispatch([TransportOperation(Message("now", {}, b""), "sales")])
        await eventually_async(lambda: handled["now"] == 1)
