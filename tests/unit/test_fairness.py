"""Whose turn it is while more is due than a batch takes, and what fairness can go by."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from sqlalchemy import select

from delayline import ConfigurationError, MemoryDelayedMessageStore, StoredDelivery
from delayline.composition import delivery_from, transport_of
from delayline.delayed.fairness import NO_GROUP, FairBy, Served, Turns
from delayline.message import DelayedMessage, Message
from delayline.settings import load_settings
from delayline.sql.databases import database_at
from delayline.sql.fair_groups import DueGroups, fair_table, in_turn
from delayline.testing import FaultyStore
from delayline.testing.conformance.messages import AT, delayed

LIMIT = 100


class Backlog:
    """Groups of numbered messages, served in turn."""

    def __init__(self, **numbers: int) -> None:
        self.waiting = {name: deque(range(number)) for name, number in numbers.items()}
        self.turns = Turns()

    def look(self) -> None:
        self.turns.found((name, numbers[0]) for name, numbers in self.waiting.items() if numbers)

    def batch(self, limit: int = LIMIT) -> Counter[str]:
        """Serve a batch, and return how many messages of each group it had."""
        turns, batch = self.turns.next(limit), Counter[str]()
        groups: dict[str, tuple[int, Any]] = {}
        for turn in turns:
            number = min(turn.most, limit - batch.total(), len(self.waiting[turn.group]))
            for _ in range(number):
                self.waiting[turn.group].popleft()
            if number:
                batch[turn.group] = number
                groups[turn.group] = (number, None)
        self.turns.served(turns, Served(groups, cut=batch.total() == limit))
        return batch


def test_a_group_with_few_messages_leaves_the_rest_to_a_busy_one() -> None:
    backlog = Backlog(busy=1000, few=3)
    backlog.look()
    assert backlog.batch() == {"busy": 50, "few": 3}  # nobody knows yet which is busy
    assert backlog.batch() == {"busy": 100}
    backlog.waiting["few"].append(0)
    backlog.look()
    assert backlog.batch() == {"few": 1, "busy": 99}


def test_busy_groups_share() -> None:
    backlog = Backlog(a=1000, b=1000, c=1000, few=1)
    backlog.look()
    served = Counter[str]()
    for _ in range(20):
        served += backlog.batch()
    assert served["few"] == 1
    assert max(served[name] for name in "abc") - min(served[name] for name in "abc") <= LIMIT


def test_more_groups_than_a_batch_has_room_for_have_their_turns_one_after_another() -> None:
    names = [f"g{number:03}" for number in range(250)]
    backlog = Backlog(**dict.fromkeys(names, 10))
    backlog.look()
    served = Counter[str]()
    for _ in range(3):
        served += backlog.batch()
    assert set(served) == set(names)
    while backlog.turns:
        served += backlog.batch()
    assert served == dict.fromkeys(names, 10)


def test_a_busy_group_is_not_starved_by_many_small_ones() -> None:
    names = [f"g{number:03}" for number in range(98)]
    backlog = Backlog(busy=1000, **dict.fromkeys(names, 0))
    for _ in range(20):
        for name in names:
            backlog.waiting[name].append(0)
        backlog.look()
        backlog.batch()
    assert len(backlog.waiting["busy"]) < 1000 - 20


def test_a_group_without_messages_is_asked_no_more_until_it_is_found_again() -> None:
    backlog = Backlog(a=500, b=500)
    backlog.look()
    backlog.waiting["b"].clear()  # other pollers have them
    backlog.batch()
    assert [turn.group for turn in backlog.turns.next(LIMIT)] == ["a"]
    backlog.waiting["b"].append(0)
    backlog.look()
    assert {turn.group for turn in backlog.turns.next(LIMIT)} == {"a", "b"}


def test_a_group_keeps_its_turn_where_the_batch_was_full_before_it() -> None:
    turns = Turns()
    turns.found([("a", 0), ("b", 0), ("c", 0)])
    asked = turns.next(3)
    turns.served(asked, Served({"a": (1, 1)}, cut=True))  # the first was as large as the batch may be
    assert [turn.group for turn in turns.next(3)] == ["b", "c", "a"]


@pytest.mark.parametrize("text", ["", "tenant", "header:", "header: ", "Destination", "destination "])
def test_what_fairness_goes_by_is_checked(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"neither 'destination' nor 'header:NAME'"):
        StoredDelivery(MemoryDelayedMessageStore(), fair_by=text)


def test_a_group_of_a_header_fits_its_column() -> None:
    by_tenant = FairBy.of("header:Tenant")
    assert str(by_tenant) == "header:Tenant"
    groups = [
        by_tenant.group_of(delayed(headers={"Tenant": value})) for value in ("a", "x" * 101, "x" * 102, "a\0", "\ud800")
    ]
    assert groups[0] == "a"
    assert len(set(groups)) == len(groups)
    assert all(len(group) <= 100 and group.isprintable() for group in groups)
    damaged = DelayedMessage(Message.from_encoded("m", b"{damaged", b""), "billing", AT)
    for message in (delayed(), delayed(headers={"Tenant": " "}), damaged):
        assert by_tenant.group_of(message) == NO_GROUP


def test_a_store_that_cannot_is_refused() -> None:
    store = FaultyStore(MemoryDelayedMessageStore(), verbs_only=True)
    with pytest.raises(ConfigurationError, match="cannot serve destinations or tenants in turn: use a Sql"):
        StoredDelivery(store, fair_by="destination")


@pytest.mark.parametrize("url", ["amqp://localhost", "azure://account"])
def test_messages_that_the_broker_holds_are_not_served_in_turn(url: str) -> None:
    settings = load_settings(flags={"url": url, "endpoint": "sales", "fair_by": "destination"}, environ={})
    with pytest.raises(ConfigurationError, match=r"needs delayed messages in a store, not in|cannot serve dest"):
        delivery_from(settings)


@pytest.mark.parametrize("url", ["amqp://localhost", "azure://account", "memory://"])
def test_queues_of_a_broker_are_not_received_in_turn(url: str) -> None:
    settings = load_settings(flags={"url": url, "endpoint": "sales", "queues_fair_by": "header:Tenant"}, environ={})
    with pytest.raises(ConfigurationError, match="give each tenant that may be busy a queue of its own"):
        transport_of(settings)


def test_a_setting_makes_a_delivery_fair() -> None:
    settings = load_settings(flags={"endpoint": "sales"}, environ={"DELAYLINE_FAIR_BY": "header:Tenant"})
    delivery = delivery_from(settings)
    assert isinstance(delivery, StoredDelivery)
    assert delivery.fair_by == FairBy("Tenant")


@pytest.mark.parametrize(("fair_by", "group"), [("destination", "[Destination]"), ("header:Tenant", "fair_group")])
def test_the_statements_of_sql_server(fair_by: str, group: str) -> None:
    pytest.importorskip("mssql_python")
    dialect = database_at("mssql://sa@host/db").dialect
    table = fair_table(dialect.catalog.store_table("sales.timeouts", None), FairBy.of(fair_by))
    first = DueGroups(table, dialect).first.sql.replace("[dbo].[sales.timeouts].", "")
    assert f"WHERE {group} > ? AND {group} < ? ORDER BY {group}, [Time]" in first
    turn = str(in_turn(select(table.c.id), table, dialect).compile(dialect=dialect.sql))
    assert f"WHERE {group} = ?" in turn.replace("[dbo].[sales.timeouts].", "")
    assert "ORDER BY [Time], [Id]" in turn.replace("[dbo].[sales.timeouts].", "")
