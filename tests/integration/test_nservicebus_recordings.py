"""What real NServiceBus endpoints wrote, received by endpoints of ours; tests/data/nservicebus says who wrote it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
import sys
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pamqp import encode
from tests.eventually import eventually_async
from tests.integration.recordings import (
    DELAY,
    OPTIONS,
    UNSEEN,
    Seen,
    Types,
    body_of,
    load,
    look,
    properties_of,
    publish,
    recorded,
    tap,
    types_of,
    values_of,
)
from tests.integration.test_timeouts import DDL, run_sql

from delayline import DelaylineError, Endpoint, Headers, InvalidMessage, Message, MessageContext, Recoverability
from delayline.cli import main
from delayline.clock import SystemClock
from delayline.failures import FAILURE_HEADERS, error_operations
from delayline.message import TimeoutHeaders, from_wire_time
from delayline.outgoing import Composer
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin import operations
from delayline.rabbitmq.amqp.properties import Delivery, Undecodable, decode_properties
from delayline.rabbitmq.amqp.wire import PublishFrames
from delayline.rabbitmq.decoding import message_from
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.forwarding import sent_on
from delayline.receiving.handlers import Handlers
from delayline.sql import SqlTransport
from delayline.timeouts import SqlTimeoutPersister, Timeout, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.servers.rabbitmq import RabbitmqServer

MARK: Final = "Tests.Row"
SECOND: Final = timedelta(seconds=1)
#: What a delayed retry adds to a message, and what the error queue adds, with their types.
RETRIED: Final = {
    Headers.RETRIES: "longstr",
    Headers.RETRIES_TIMESTAMP: "longstr",
    Headers.DELIVER_AT: "longstr",
    DELAY: "int32",
}
FAILED: Final = dict.fromkeys(
    [
        Headers.EXCEPTION_TYPE,
        Headers.EXCEPTION_MESSAGE,
        Headers.EXCEPTION_SOURCE,
        Headers.EXCEPTION_STACK_TRACE,
        Headers.TIME_OF_FAILURE,
        Headers.FAILED_QUEUE,
        Headers.PROCESSING_MACHINE,
        Headers.PROCESSING_ENDPOINT,
        Headers.HOST_ID,
        Headers.HOST_DISPLAY_NAME,
    ],
    "longstr",
) | {Headers.EXCEPTION_HELP_LINK: "void"}
#: What .NET also writes, and what delayline does, by place and version: all differences there are.
DIFFERENCES: Final = {
    ("delayed", "v1"): ({"NServiceBus.NonDurableMessage": "longstr"}, {Headers.DELIVER_AT: "longstr"}),
    ("delayed", "v2"): ({"NServiceBus.Version": "longstr"}, {}),
    ("error", "v1"): ({"NServiceBus.NonDurableMessage": "longstr"}, {Headers.DELIVER_AT: "longstr"}),
    ("error", "v2"): ({"NServiceBus.Version": "longstr"}, {Headers.EXCEPTION_HELP_LINK: "void"}),
    ("sent", "v1"): ({"NServiceBus.Version": "longstr", "$.diagnostics.originating.hostid": "longstr"}, {}),
    ("sent", "v2"): (
        {
            "NServiceBus.Version": "longstr",
            "$.diagnostics.originating.hostid": "longstr",
            "NServiceBus.OpenTelemetry.StartNewTrace": "longstr",
        },
        {},
    ),
}
#: .NET's Exception.Data has no counterpart.
EXCEPTION_DATA: Final = "NServiceBus.ExceptionInfo.Data."
#: Headers whose values describe one run or one machine.
OF_THE_RUN: Final = {
    Headers.RETRIES_TIMESTAMP,
    Headers.DELIVER_AT,
    Headers.TIME_SENT,
    Headers.TIME_OF_FAILURE,
    Headers.EXCEPTION_TYPE,
    Headers.EXCEPTION_MESSAGE,
    Headers.EXCEPTION_SOURCE,
    Headers.EXCEPTION_STACK_TRACE,
    Headers.PROCESSING_MACHINE,
    Headers.ORIGINATING_MACHINE,
    Headers.HOST_ID,
    Headers.HOST_DISPLAY_NAME,
    Headers.MESSAGE_ID,
    Headers.CORRELATION_ID,
    Headers.CONVERSATION_ID,
}


class Failing:
    """An endpoint whose handler keeps what it has seen, and fails as long as it should."""

    def __init__(self, url: str, name: str, delays: Sequence[timedelta]) -> None:
        self.url, self.name, self.fails = url, name, True
        self.seen: list[Message] = []
        self.endpoint = Endpoint(
            name,
            transport=RabbitMQTransport(url),
            delayed_delivery=DelayLevelDelivery(),
            recoverability=Recoverability(0, delays=delays),
        )
        self.endpoint.handler(self.handle)

    async def handle(self, message: Message, context: MessageContext) -> None:
        self.seen.append(message)
        if self.fails:
            raise ValueError("it fails here")

    async def failed(self, rows: Sequence[dict[str, Any]]) -> tuple[list[Seen], list[Seen]]:
        """Publish the messages, and return their copies for delayed retries and those in the error queue."""
        await self.endpoint.setup()
        await tap(self.url, levels_of(self.url))
        async with self.endpoint:
            await publish(self.url, rows, key=self.name)
            await eventually_async(lambda: self.count("error", len(rows)))
        return await look(self.url, "tap"), await look(self.url, "error")

    async def count(self, queue: str, number: int) -> bool:
        return bool(await self.endpoint.transport.count(queue) == number)  # type: ignore[attr-defined]


def levels_of(url: str) -> list[str]:
    prefix = "nsb.delay-level" if "delays=v1" in url else "nsb.v2.delay-level"
    return [f"{prefix}-{level:02}" for level in range(4)]


def marked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a header that distinguishes them."""
    return [
        row | {"headers": row["headers"] | {MARK: {"type": "longstr", "value": str(number)}}}
        for number, row in enumerate(rows)
    ]


def by_mark(messages: Sequence[Seen]) -> dict[str, Seen]:
    """Return the messages by that header; of several with one the first."""
    return {one.values[MARK]: one for one in reversed(messages)}


@pytest.mark.slow
@pytest.mark.parametrize("file", OPTIONS)
async def test_recorded_messages_go_the_whole_way(rabbitmq_url: str, file: str) -> None:
    """Given all messages of .NET, when they fail and are retried, then nothing of them is lost or changed anywhere."""
    rows, url = marked(recorded(file)), f"{rabbitmq_url}{OPTIONS[file]}"
    sales = Failing(url, "sales", delays=[SECOND, SECOND])
    copies, failed = await sales.failed(rows)
    arguments = ["errors", "retry", "--all", "--yes", "--url", url]
    ran = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert ran.exit_code == 0, ran.output
    again = await look(url, "sales")
    handled = sorted(sales.seen, key=lambda one: int(one.headers[MARK]))
    sales.fails, sales.seen = False, []
    async with sales.endpoint:
        await eventually_async(lambda: len(sales.seen) == len(rows))
    for row in rows:
        mark, types = row["headers"][MARK]["value"], {k: v for k, v in types_of(row).items() if k not in UNSEEN}
        # Then handlers have seen every header and the whole body, at each attempt
        attempts = [one for one in handled if one.headers[MARK] == mark]
        rounds = int(values_of(row).get(Headers.RETRIES, 0))
        assert len(attempts) == 3 - rounds
        for attempt in attempts:
            assert attempt.body == body_of(row)
        first = attempts[0].headers
        assert first.keys() == types.keys()
        assert {name: first[name] for name in types} == {
            name: "" if value is None else value for name, value in values_of(row).items() if name not in UNSEEN
        }
        # Then the delayed copy, the one in the error queue and the one sent back have what they should, and no more
        expected = {name: kind for name, kind in types.items() if name != Headers.TIME_TO_BE_RECEIVED}
        copy, error, back = (by_mark(place)[mark] for place in (copies, failed, again))
        assert copy.types == expected | RETRIED
        in_error = expected | RETRIED | FAILED
        del in_error[Headers.RETRIES], in_error[DELAY]
        assert error.types == in_error
        assert back.types == {name: kind for name, kind in in_error.items() if not name.startswith(FAILURE_HEADERS)}
        for one in (copy, error, back):
            assert (one.properties["delivery_mode"], one.body) == (2, body_of(row))
            kept = {name: value for name, value in values_of(row).items() if name in one.values}
            changed = {name for name, value in kept.items() if one.values[name] != (value or "")}
            assert changed <= {*RETRIED, *FAILED}
        assert error.properties["message_id"] == values_of(row)[Headers.MESSAGE_ID]


@pytest.mark.slow
@pytest.mark.parametrize("file", OPTIONS)
async def test_failures_differ_from_dotnets_only_as_listed(rabbitmq_url: str, file: str) -> None:
    """Given a message that failed at .NET, when it fails here, then retry and error queue differ as listed, exactly."""
    rows, version, url = recorded(file), file[9:11], f"{rabbitmq_url}{OPTIONS[file]}"
    retried = next(row for row in rows if Headers.RETRIES in row["headers"] and "delay-level" in row["exchange"])
    message_id, theirs = values_of(retried)[Headers.MESSAGE_ID], {"delayed": retried}
    theirs["error"] = next(
        row
        for row in rows
        if Headers.FAILED_QUEUE in row["headers"] and values_of(row)[Headers.MESSAGE_ID] == message_id
    )
    name = values_of(theirs["error"])[Headers.FAILED_QUEUE]
    added = {*RETRIED, "NServiceBus.Version", "NServiceBus.NonDurableMessage"}
    sent = retried | {"headers": {one: value for one, value in retried["headers"].items() if one not in added}}
    delay = timedelta(seconds=retried["headers"][DELAY]["value"])
    copies, [error] = await Failing(url, name, delays=[delay]).failed([sent])
    copy = copies[0]  # the others are the same on its way down the levels
    for place, ours in (("delayed", copy), ("error", error)):
        row = theirs[place]
        types = {one: kind for one, kind in types_of(row).items() if one not in UNSEEN - {DELAY}}
        types = {one: kind for one, kind in types.items() if not one.startswith(EXCEPTION_DATA)}
        assert difference(types, ours.types) == DIFFERENCES[place, version]
        same = ours.values.keys() & types.keys() - OF_THE_RUN
        assert {one: ours.values[one] for one in same} == {one: values_of(row)[one] or "" for one in same}
    assert (copy.exchange, copy.routing_key) == (retried["exchange"], retried["routing_key"])
    wanted = dict(retried["properties"])
    assert {**copy.properties, "message_id": wanted["message_id"]} == {"message_type": wanted.pop("type"), **wanted}
    assert error.properties == copy.properties | {"message_id": message_id}


def difference(theirs: Types, ours: Types) -> tuple[Types, Types]:
    """Return what only one of them has, or has with another type."""
    return dict(theirs.items() - ours.items()), dict(ours.items() - theirs.items())


@pytest.mark.parametrize("file", OPTIONS)
async def test_own_delayed_sends_are_as_dotnets(rabbitmq_url: str, file: str) -> None:
    """Given the delayed sends of .NET, when the same is sent here, then it is published in the same way."""
    version, url = file[9:11], f"{rabbitmq_url}{OPTIONS[file]}"
    rows = [row for row in recorded(file) if DELAY in row["headers"] and Headers.RETRIES not in row["headers"]]
    assert len(rows) >= 4
    names = {values_of(row)[Headers.ORIGINATING_ENDPOINT] for row in rows}
    [name] = names
    destination = rows[0]["routing_key"].split(".", 28)[28]
    endpoint = Endpoint(name, transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure([destination])
    await tap(url, levels_of(url))
    own = {*OF_THE_RUN, Headers.ORIGINATING_ENDPOINT, Headers.REPLY_TO, Headers.INTENT, *UNSEEN}
    async with endpoint:
        for row in rows:
            headers = {
                one: value
                for one, value in values_of(row).items()
                if one not in own and one not in DIFFERENCES["sent", version][0]
            }
            delay = timedelta(seconds=row["headers"][DELAY]["value"])
            await endpoint.send(
                destination, body_of(row), headers=headers, delay=delay, message_id=row["properties"]["message_id"]
            )
    found = {one.properties["message_id"]: one for one in await look(url, "tap")}
    for row in rows:
        ours = found[row["properties"]["message_id"]]
        assert (ours.exchange, ours.routing_key) == (row["exchange"], row["routing_key"])
        theirs = {one: kind for one, kind in types_of(row).items() if one not in UNSEEN - {DELAY}}
        assert difference(theirs, ours.types) == DIFFERENCES["sent", version]
        wanted = dict(row["properties"])
        assert ours.properties == {"message_type": wanted.pop("type"), **wanted}
        assert ours.body == body_of(row)


@pytest.mark.parametrize("topology", ["conventional", "direct"])
async def test_declared_topology_is_that_of_dotnet(rabbitmq: RabbitmqServer, rabbitmq_url: str, topology: str) -> None:
    """Given endpoints of the names of .NET's, when set up, then queues, exchanges and bindings are those of .NET."""
    theirs = load("rabbitmq-v1-topology")[topology]
    url = f"{rabbitmq_url}?delays=v1&queue_type=classic&topology={topology}"
    for name in ("Net.Sales", "Py.Shop"):
        endpoint = Endpoint(name, transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())
        await endpoint.setup()
        async with endpoint:
            pass
    await operations.subscribe(BrokerAddress.parse(url), "Py.Shop", "Lab.Messages.OrderPlaced")
    vhost = rabbitmq_url.rsplit("/", 1)[1]
    ours = {kind: rabbitmq.api("GET", f"{kind}/{vhost}").json() for kind in ("queues", "exchanges", "bindings")}
    for kind in ("queues", "exchanges"):
        found = {one["name"]: one for one in ours[kind] if one["name"] and not one["name"].startswith("amq.")}
        # .NET declares an exchange for each type that an event is derived from, too
        assert found.keys() ^ theirs[kind].keys() == (OF_BASE_TYPES if theirs[kind].keys() & OF_BASE_TYPES else set())
        for name, one in found.items():
            one["arguments"].pop("x-queue-type", None)  # which the broker takes for the same as leaving it out
            assert {fact: one[fact] for fact in theirs[kind][name]} == theirs[kind][name]
    bound = {
        (one["source"], one["destination_type"], one["destination"], one["routing_key"])
        for one in ours["bindings"]
        if one["source"]
    }
    assert bound ^ {tuple(one[:4]) for one in theirs["bindings"]} == OTHER_BINDINGS[topology]


OF_BASE_TYPES: Final = {"NServiceBus:IEvent", "NServiceBus:IMessage", "System:Object"}
#: .NET's exchanges for base types; and the second binding of a direct subscriber, which the first one contains.
OTHER_BINDINGS: Final = {
    "conventional": {("Lab.Messages:OrderPlaced", "exchange", base, "") for base in OF_BASE_TYPES},
    "direct": {("amq.topic", "queue", "Py.Shop", "Lab-Messages-OrderPlaced.#")},
}


async def test_messages_that_wait_in_levels_are_read(rabbitmq_url: str) -> None:
    """Given messages as they lie in a level for eight years, when they arrive, then handlers see all of each."""
    rows = [row | {"event": "published"} for row in load("rabbitmq-v1-waiting")]
    for row in rows:
        row["properties"] = dict(row["properties"])
        row["properties"]["type"] = row["properties"].pop("message_type")
        row["properties"]["delivery_mode"] = int(row["properties"]["delivery_mode"])
    sales = Failing(rabbitmq_url, "sales", delays=[])
    sales.fails = False
    await sales.endpoint.setup()
    async with sales.endpoint:
        await publish(rabbitmq_url, rows)
        await eventually_async(lambda: len(sales.seen) == len(rows))
    for row in rows:
        [message] = [one for one in sales.seen if one.id == row["properties"]["message_id"]]
        assert dict(message.headers) == {one: value for one, value in values_of(row).items() if one not in UNSEEN}
        assert message.body == body_of(row)


@pytest.mark.parametrize(
    ("file", "options", "exchange", "key"),
    [
        ("rabbitmq-v2-conventional", "", "Contoso.Lab:Happened", ""),
        ("rabbitmq-v2-direct", "?topology=direct", "amq.topic", "Contoso-Lab-Happened"),
    ],
)
async def test_events_of_dotnet_are_subscribed_to(
    rabbitmq_url: str, file: str, options: str, exchange: str, key: str
) -> None:
    """Given a subscription, when .NET publishes an event of the type, then it arrives; and no more once undone."""
    [event] = [row for row in recorded(file) if row["exchange"] == exchange and row["routing_key"] == key][:1]
    url, seen = f"{rabbitmq_url}{options}", []
    endpoint, address = Endpoint("sales", transport=RabbitMQTransport(url)), BrokerAddress.parse(url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message.id)

    async with endpoint:
        for _ in range(2):  # idempotent
            await operations.subscribe(address, "sales", "Contoso.Lab.Happened")
        await publish(rabbitmq_url, [event], exchange, key)
        await eventually_async(lambda: len(seen) == 1)
        for _ in range(2):
            await operations.subscribe(address, "sales", "Contoso.Lab.Happened", undo=True)
        await publish(rabbitmq_url, [event], exchange, key)
        await endpoint.send("sales", b"", message_id="last")
        await eventually_async(lambda: "last" in seen)
    assert len(seen) == 2


@pytest.mark.parametrize(("product", "name"), [("postgresql", "Net.Legacy"), ("mariadb", "Net.Maria")])
async def test_recorded_timeouts_are_dispatched(product: str, name: str, request: pytest.FixtureRequest) -> None:
    """Given the rows that .NET has stored, and a saga that is over, then all others reach their queues as they were."""
    url = request.getfixturevalue(f"{product}_url")
    table = load(f"timeout-table-{product}")
    quote = '"' if product == "postgresql" else "`"
    ddl = [text.replace("Sales_Eu_", f"{name.replace('.', '_')}_") for text in DDL[product]]
    columns = [column["name"] for column in table["columns"]]
    insert = (
        f"insert into {quote}{name.replace('.', '_')}_TimeoutData{quote} values ({', '.join(['%s'] * len(columns))})"  # noqa: S608
    )
    values = []
    for row in table["rows"]:
        whole = {**row, "State": base64.b64decode(row["State_base64"]), "Time": datetime.fromisoformat(row["Time"])}
        values.append(tuple(whole[column] for column in columns))
    run_sql(product, url, *((text, ()) for text in ddl), *((insert, one) for one in values))
    sagas = [row["SagaId"] for row in table["rows"] if uuid.UUID(row["SagaId"]).int]
    transport, persister = SqlTransport(url), SqlTimeoutPersister(url)
    await transport.setup_infrastructure([name, "Py.Sink", "error"])
    await persister.setup_infrastructure(name)
    await persister.open(name)
    dues = {one.id: one.due for one in await persister.pending(limit=100)}
    assert len(dues) == len(table["rows"])
    assert await persister.remove_by_saga(uuid.UUID(sagas[0])) == sagas.count(sagas[0])
    await persister.close()
    rows = [row for row in table["rows"] if row["SagaId"] != sagas[0]]
    for row in rows:  # PostgreSQL's column and MariaDB's header have the microsecond
        headers = json.loads(row["Headers"])
        expected = from_wire_time(headers[TimeoutHeaders.EXPIRE])
        assert abs(dues[headers[Headers.MESSAGE_ID]] - expected).total_seconds() < 0.001
    handled: list[Message] = []
    endpoint = Endpoint(name, transport=transport, delayed_delivery=TimeoutManagerDelivery(persister))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message)

    here = [row for row in rows if row["Destination"] == name]
    async with endpoint:
        await eventually_async(lambda: len(handled) == len(here))
        there = [one async for one in _queued(endpoint, len(rows) - len(here))]
    found = {message.id: message for message in [*handled, *there]}
    for row in rows:
        headers = json.loads(row["Headers"])
        message = found[headers[Headers.MESSAGE_ID]]
        assert message.body == base64.b64decode(row["State_base64"])
        changed = {header for header, value in headers.items() if message.headers.get(header) != value}
        assert changed <= {Headers.TIME_SENT, Headers.REPLY_TO, TimeoutHeaders.OLD_REPLY_TO}


@pytest.mark.parametrize(("product", "name"), [("postgresql", "Net.Legacy"), ("mariadb", "Net.Maria")])
async def test_table_and_rows_of_timeouts_are_as_dotnets(
    product: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Given .NET's timeouts table and a row, when table and row are made here, then columns and types are the same."""
    url = request.getfixturevalue(f"{product}_url")
    theirs, quote = load(f"timeout-table-{product}"), '"' if product == "postgresql" else "`"
    persister = SqlTimeoutPersister(url)
    await persister.setup_infrastructure(name)
    facts, indexes = CATALOGUE[product]
    table = f"{name.replace('.', '_')}_TimeoutData"
    made = run_sql(product, url, (facts, (table,)))
    # Then they are those of .NET's statements on this server, whose version chooses the collation
    run_sql(product, url, *((text, ()) for text in DDL[product]))
    assert made == run_sql(product, url, (facts, ("Sales_Eu_TimeoutData",)))
    without_collation = slice(4) if product == "mariadb" else slice(None)
    assert [row[without_collation] for row in made] == [
        tuple(column.values())[without_collation] for column in theirs["columns"]
    ]
    assert run_sql(product, url, (indexes, (table,))) == sorted(tuple(one.values()) for one in theirs["indexes"])
    # When a message of .NET's content is stored
    row = theirs["rows"][0]
    message = Message("0197a1c5-7e52-7d3e-b7a6-0242ac120002", json.loads(row["Headers"]), b"state")
    due = from_wire_time(json.loads(row["Headers"])[TimeoutHeaders.EXPIRE])
    await persister.open(name)
    await persister.add(Timeout(message.id, message, name, due, uuid.UUID(row["SagaId"])))
    await persister.close()
    [found] = run_sql(product, url, (f"select * from {quote}{table}{quote}", ()))  # noqa: S608
    ours = dict(zip([column["name"] for column in theirs["columns"]], found, strict=True))
    assert json.loads(ours["Headers"]) == json.loads(row["Headers"])
    assert (str(ours["SagaId"]), bytes(ours["State"]), ours["Destination"]) == (row["SagaId"], b"state", name)
    kept = datetime.fromisoformat(row["Time"])
    assert timedelta(0) <= ours["Time"] - kept <= SECOND  # rounded up where theirs is cut off


#: Statements that describe a table as the recorder did: its columns, and its indexes.
CATALOGUE: Final = {
    "postgresql": (
        "select column_name, data_type, udt_name, character_maximum_length, is_nullable "
        "from information_schema.columns where table_name = %s order by ordinal_position",
        "select indexname, indexdef from pg_indexes where tablename = %s order by indexname",
    ),
    "mariadb": (
        "select column_name, column_type, is_nullable, character_set_name, collation_name "
        "from information_schema.columns where table_name = %s and table_schema = database() order by ordinal_position",
        "select index_name, column_name, non_unique from information_schema.statistics "
        "where table_name = %s and table_schema = database() order by index_name",
    ),
}


async def _queued(endpoint: Endpoint, number: int) -> Any:  # noqa: ANN401
    transport: Any = endpoint.transport
    async with asyncio.timeout(20):
        while await transport.count("Py.Sink") < number:  # noqa: ASYNC110 - as it is seen
            await asyncio.sleep(0.05)
    for message in await transport.browse("Py.Sink", 100):
        yield message


EVERY: Final = [row for file in OPTIONS for row in recorded(file)]


@given(st.sampled_from(EVERY), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6), st.data())
def test_damaged_recordings_stop_no_receiver(
    row: dict[str, Any], changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Given a recorded message with any bytes changed or cut off, then it is read, or refused as one message."""
    properties = properties_of(row)
    headers = {name: value for name, value in values_of(row).items() if value is not None}
    raw = bytearray(struct.pack(">H", 1 << 13 | 1 << 7) + encode.field_table(headers))
    raw += encode.short_string(str(properties.message_id))
    for at, value in changes:
        raw[at % len(raw)] = value
    encoded = bytes(raw[: data.draw(st.integers(2, len(raw)))])
    for read in (decode_properties, sent_on):
        try:
            read(encoded)
        except (Undecodable, InvalidMessage):
            continue
    body = base64.b64decode(row["body_base64"])
    try:
        message_from(
            Delivery(1, redelivered=False, exchange="", routing_key="sales", encoded_properties=encoded, body=body)
        )
    except (Undecodable, InvalidMessage):
        return


NAMES: Final = sorted(
    {name for row in EVERY for name in row["headers"]} | set(FAILURE_HEADERS) | {"", "\x00", "X" * 300}
)
VALUES: Final = st.one_of(
    st.text("aZ0,;=:.-{} ä\0\ud800", max_size=40),
    st.sampled_from(["", "True", "-1", "9" * 400, "00:00:00", "\ud800", "A.B," * 5_000, "5f3c9f2a", "Reply"]),
)


@given(st.sampled_from(EVERY), st.dictionaries(st.sampled_from(NAMES), VALUES), st.sets(st.sampled_from(NAMES)))
def test_odd_headers_of_recordings_fail_as_one_message(
    row: dict[str, Any], changed: dict[str, str], without: set[str]
) -> None:
    """Given a recorded message with any headers changed or missing, then whatever is done to it works or is refused."""
    headers = {name: value or "" for name, value in values_of(row).items() if name not in without} | changed
    headers |= {name.lower(): value for name, value in changed.items()}
    message = Message(row["properties"]["message_id"], {name: str(value) for name, value in headers.items()}, b"{}")
    composer, now = Composer("sales", SystemClock(), reply_to="sales"), datetime.now(UTC)
    handlers = Handlers()
    handlers.add_typed("Contoso.Lab.Ping", handle_nothing)
    for work in (
        lambda: message.logical,
        lambda: handlers.calls(message),
        lambda: composer.reply(message, b"", None, SECOND),
        lambda: composer.again(message, "sales", delay=SECOND),
        lambda: composer.forward(message, "sales", SECOND, None),
        lambda: Recoverability().decide(ValueError(), 99, message.headers, now),
        lambda: PublishFrames(1, 131_072).encode(Publication(message, "", "sales")),
    ):
        with contextlib.suppress(DelaylineError):
            work()
    forms = error_operations(
        message, ValueError(), failed_queue="sales", error_queue="error", endpoint_name="sales", now=now
    )
    for operation in forms:  # one of them is kept, or the last one is refused
        with contextlib.suppress(DelaylineError):
            PublishFrames(1, 131_072).encode(Publication(operation.message, "", "error"))


async def handle_nothing(message: Any, context: MessageContext) -> None:  # noqa: ANN401
    """A typed handler."""


@pytest.mark.slow
async def test_the_example_answers_dotnet(rabbitmq_url: str, tmp_path: Path) -> None:
    """Given the Python half of the example, when a command of .NET comes, then it is answered now and in a while."""
    [ping] = [
        row for row in recorded("rabbitmq-v2-conventional") if row["properties"].get("type") == "Contoso.Lab.Ping"
    ][:1]
    types = "Contoso.Messages.BillOrder, App, Version=1.0.0.0, Culture=neutral, PublicKeyToken=null"
    headers = {**ping["headers"], Headers.ENCLOSED_MESSAGE_TYPES: {"type": "longstr", "value": types}}
    command = {**ping, "headers": headers, "body_base64": base64.b64encode(b'{"OrderId":"17"}').decode()}
    transport = RabbitMQTransport(rabbitmq_url)
    await transport.start()
    await transport.setup_infrastructure(["net"])
    example = Path(__file__).parents[2] / "examples" / "dotnet" / "billing.py"
    running = await asyncio.create_subprocess_exec(
        sys.executable, str(example), stdout=asyncio.subprocess.PIPE, env={**os.environ, "BROKER": rabbitmq_url}
    )
    try:
        await eventually_async(lambda: transport.has_queue("Billing"))
        await publish(rabbitmq_url, [command], key="Billing")
        assert running.stdout is not None
        assert (await asyncio.wait_for(running.stdout.readline(), 30)).decode() == "billed 17\n"
        await eventually_async(partial(has_messages, transport, 1))
        await eventually_async(partial(has_messages, transport, 2))
        for answer in await transport.browse("net", 10):
            assert json.loads(answer.body) == {"OrderId": "17"}
            assert answer.headers[Headers.ENCLOSED_MESSAGE_TYPES] == "Contoso.Messages.OrderBilled"
            assert answer.headers[Headers.CORRELATION_ID] == ping["properties"]["correlation_id"]
    finally:
        running.terminate()
        await running.wait()
        await transport.stop()


async def has_messages(transport: RabbitMQTransport, number: int) -> bool:
    return await transport.count("net") == number
