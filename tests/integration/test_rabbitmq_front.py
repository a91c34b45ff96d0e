"""A store in front of delay levels: its management shows and changes messages as they were sent."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import pytest
from tests.cli.conftest import delayline_process
from tests.eventually import eventually_async

from delayline import Endpoint, Message, SqlDelayedMessageStore, StoredDelivery
from delayline.delayed.store import Outcome, SupportsDueForecast, SupportsLookup, SupportsManagement
from delayline.errors import ConfigurationError
from delayline.message import DelayedMessage
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.front import managed_as_sent, parked
from delayline.testing.conformance.native_delivery import Arrivals
from delayline.transaction import TransactionMode
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
NOW = datetime(2026, 11, 26, tzinfo=UTC)


class Managed(SupportsManagement, SupportsLookup, SupportsDueForecast):
    """What a store that searches has as management."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlDelayedMessageStore]:
    store = SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'front.db'}")
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


def delayed(id: str, destination: str, due: datetime, *, leaves: datetime | None = None) -> DelayedMessage:
    """Return a stored message; with `leaves` one that goes to the levels then."""
    operation = TransportOperation(Message(id, {"k": "v"}, b"body"), destination)
    if leaves is None:
        return DelayedMessage(operation.message, destination, due)
    return DelayedMessage(operation.message, parked(operation, due).destination, leaves)


#: Far ones, one that waits for a fraction of a second, and ordinary ones, in the order that they are due.
MESSAGES = [
    delayed("soon", "sales", NOW + 10 * SECOND),
    delayed("fraction", "billing", NOW + 60 * SECOND, leaves=NOW + SECOND),
    delayed("day", "sales", NOW + DAY),
    delayed("far", "sales", NOW + 3200 * DAY, leaves=NOW + 94 * DAY),
    delayed("year", "billing", NOW + 3300 * DAY),
    delayed("farther", "sales", NOW + 9000 * DAY, leaves=NOW + 5894 * DAY),
]
SENT = {
    "soon": ("sales", NOW + 10 * SECOND),
    "fraction": ("billing", NOW + 60 * SECOND),
    "day": ("sales", NOW + DAY),
    "far": ("sales", NOW + 3200 * DAY),
    "year": ("billing", NOW + 3300 * DAY),
    "farther": ("sales", NOW + 9000 * DAY),
}


@pytest.fixture
async def managed(store: SqlDelayedMessageStore) -> Managed:
    await store.store_many(MESSAGES)
    return cast("Managed", managed_as_sent(store))


async def test_messages_are_listed_as_they_were_sent(managed: Managed) -> None:
    found = await managed.pending()
    assert {one.id: (one.destination, one.due) for one in found} == SENT
    assert [one.id for one in found] == list(SENT)
    assert found[3].message.body == b"body"


async def test_a_destination_has_all_of_its_messages(managed: Managed) -> None:
    assert [one.id for one in await managed.pending(destination="sales")] == ["soon", "day", "far", "farther"]
    assert [one.id for one in await managed.pending(destination="billing")] == ["fraction", "year"]


@pytest.mark.parametrize("limit", [1, 2, 4])
async def test_pages_have_each_message_once(managed: Managed, limit: int) -> None:
    ids: list[str] = []
    while page := await managed.pending(limit=limit, offset=len(ids)):
        ids += [one.id for one in page]
    assert ids == list(SENT)
    found: list[str] = []
    while some := await managed.due_between(None, None, limit=limit, offset=len(found)):
        found += [one.message.id for one in some]
    assert found == list(SENT)


async def test_messages_are_found_by_when_they_are_due(managed: Managed) -> None:
    found = await managed.due_between(NOW + 60 * SECOND, NOW + 3300 * DAY, limit=10)
    assert [(one.message.id, one.message.destination) for one in found] == [
        ("fraction", "billing"),
        ("day", "sales"),
        ("far", "sales"),
    ]
    assert found[2].message.message.body == b""
    assert found[2].size > len(b"body")
    one = await managed.find("far", body_limit=2)
    assert one is not None
    assert (one.message.destination, one.message.due) == SENT["far"]
    assert one.message.message.body == b"bo"


async def test_counts_are_by_destination_and_due_time_as_sent(managed: Managed) -> None:
    counts = await managed.count_by_due(1000 * DAY)
    assert [(one.destination, one.count) for one in counts] == [
        ("billing", 1),
        ("sales", 2),
        ("sales", 1),
        ("billing", 1),
        ("sales", 1),
    ]
    assert all(one.start <= NOW + 9000 * DAY for one in counts)


async def test_a_forecast_is_by_destination_and_due_time_as_sent(managed: Managed) -> None:
    edges = [NOW + 30 * SECOND, NOW + 100 * DAY, NOW + 8000 * DAY]
    named = await managed.due_forecast(edges, by_destination=True)
    assert [one.count for one in named.buckets] == [1, 2, 2, 1]
    assert [dict(one.destinations) for one in named.buckets] == [
        {"sales": 1},
        {"billing": 1, "sales": 1},
        {"billing": 1, "sales": 1},
        {"sales": 1},
    ]
    plain = await managed.due_forecast(edges)
    assert [(one.count, dict(one.destinations)) for one in plain.buckets] == [(1, {}), (2, {}), (2, {}), (1, {})]
    assert plain.earliest == NOW + 10 * SECOND


async def test_the_earliest_due_time_is_not_when_a_message_leaves_the_store(store: SqlDelayedMessageStore) -> None:
    await store.store(delayed("far", "sales", NOW + 3200 * DAY, leaves=NOW + 94 * DAY))
    managed = cast("Managed", managed_as_sent(store))
    assert (await managed.due_forecast([NOW])).earliest == NOW + 3200 * DAY


async def test_a_rescheduled_message_keeps_all_but_its_due_time(
    managed: Managed, store: SqlDelayedMessageStore
) -> None:
    for id in ("far", "fraction", "day"):
        assert await managed.reschedule(id, NOW + 20 * SECOND) is Outcome.DONE
    kept = {one.id: one for one in await store.pending()}
    for id in ("far", "fraction", "day"):
        assert (kept[id].destination, kept[id].due) == (SENT[id][0], NOW + 20 * SECOND)
        assert (kept[id].message.body, kept[id].message.headers) == (b"body", {"k": "v"})
    assert kept["farther"].destination.endswith("Z|sales")
    assert await managed.reschedule("none", NOW) is Outcome.NOT_PENDING


async def test_a_message_that_is_cancelled_while_it_is_rescheduled_stays_cancelled(
    managed: Managed, store: SqlDelayedMessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = store.reschedule

    async def cancelled_after(message_id: str, due: datetime) -> Outcome:
        outcome = await move(message_id, due)
        await store.cancel(message_id)
        return outcome

    monkeypatch.setattr(store, "reschedule", cancelled_after)
    assert await managed.reschedule("far", NOW) is Outcome.NOT_PENDING
    assert "far" not in {one.id for one in await store.pending()}


async def test_a_message_that_the_poller_has_is_not_rescheduled(
    managed: Managed, store: SqlDelayedMessageStore
) -> None:
    await store.fetch_due(NOW + 95 * DAY, 10, max_bytes=10_000)
    assert await managed.reschedule("far", NOW) is Outcome.DISPATCHING
    assert (await managed.find("far", body_limit=0)) is not None


class ManagementOnly:
    """A store's management, without its search and its replacement."""

    def __init__(self, store: SupportsManagement) -> None:
        self.cancel, self.reschedule = store.cancel, store.reschedule
        self.pending, self.count_by_due = store.pending, store.count_by_due


async def test_a_store_that_replaces_nothing_refuses(managed: Managed, store: SqlDelayedMessageStore) -> None:
    """Given a store with management alone, when a message for the levels is rescheduled, then it says what to do."""
    plain = cast("SupportsManagement", managed_as_sent(ManagementOnly(store)))
    refusal = "'far', which waits there for the delay levels, cannot be rescheduled: cancel it"
    with pytest.raises(ConfigurationError, match=refusal):
        await plain.reschedule("far", NOW)
    assert await plain.reschedule("day", NOW + 2 * DAY) is Outcome.DONE
    assert await plain.cancel("far") is Outcome.DONE
    assert [one.id for one in await plain.pending(destination="sales")] == ["soon", "day", "farther"]


async def test_far_messages_are_rescheduled_by_the_endpoint_and_the_command_line(
    rabbitmq_url: str, tmp_path: Path
) -> None:
    """Given messages of years, when rescheduled to soon, then they arrive, and the others are shown as sent."""
    front = f"sqlite:///{tmp_path / 'front.db'}"
    delivery = DelayLevelDelivery(stored=StoredDelivery(SqlDelayedMessageStore(front)))
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), delayed_delivery=delivery)
    arrivals = Arrivals(endpoint)
    async with endpoint:
        for days in (3200, 3210, 3220, 9000):
            await endpoint.send("sales", b"", message_id=f"{days}", delay=days * DAY)
        places = ["--endpoint", "sales", "--url", rabbitmq_url, "--store-url", front]
        command = delayline_process("reschedule", "3200", "--delay", "1s", *places)
        out, err = await asyncio.to_thread(command.communicate, timeout=120)
        assert command.returncode == 0, out + err
        await endpoint.delayed.reschedule("3210", datetime.now(UTC) + 2 * SECOND)
        await endpoint.delayed.reschedule("3220", datetime.now(UTC) - SECOND)
        assert set(await arrivals.number(3, within=60)) == {"3200", "3210", "3220"}

        async def only_one_is_pending() -> bool:  # a message is removed after it has arrived
            return len(await endpoint.delayed.pending(destination="sales")) == 1

        await eventually_async(only_one_is_pending)
        [left] = await endpoint.delayed.pending(destination="sales")
        assert (left.id, left.destination) == ("9000", "sales")
        assert abs(left.due - datetime.now(UTC) - 9000 * DAY) < DAY
        shown = delayline_process("pending", "--json", "--destination", "sales", *places)
        out, err = await asyncio.to_thread(shown.communicate, timeout=120)
        assert '"9000"' in out, out + err
        assert "Z|sales" not in out
        transport = endpoint.transport
        assert isinstance(transport, RabbitMQTransport)
        await eventually_async(lambda: len(arrivals.messages) == 3)
        assert await transport.count("error") == 0
