"""What real NServiceBus endpoints wrote, received by endpoints of ours; tests/data/nservicebus says who wrote it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
import uuid
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aio_pika
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, encode
from tests.eventually import eventually_async
from tests.integration.test_timeouts import DDL, run_sql

from delayline import Endpoint, Headers, InvalidMessage, Message, MessageContext, Recoverability
from delayline.message import TimeoutHeaders, from_wire_time
from delayline.rabbitmq import RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin import operations
from delayline.rabbitmq.amqp.properties import Delivery, Undecodable, decode_properties, message_from, sent_on
from delayline.sql import SqlTransport
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA: Final = Path(__file__).parents[1] / "data" / "nservicebus"
FILES: Final = ["rabbitmq-v2-conventional", "rabbitmq-v2-direct", "rabbitmq-v1-conventional", "rabbitmq-v1-direct"]
#: Headers of the recordings that a handler does not see: the sender's or the broker's own business.
UNSEEN: Final = {
    "x-dotnet-pub-seq-no",
    "NServiceBus.Transport.RabbitMQ.ConfirmationId",
    "NServiceBus.Transport.RabbitMQ.DelayInSeconds",
    "NServiceBus.Transport.RabbitMQ.UseNonPersistentDelivery",
}
#: Headers in the error queue that only one side writes: .NET's details of the exception, and its retries by policy.
DOTNET_ONLY: Final = {"NServiceBus.Retries.Timestamp"}
EXCEPTION_DATA: Final = "NServiceBus.ExceptionInfo.Data."


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the messages that .NET published, one for each message id and place."""
    rows: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())
    return [row for row in rows if row["event"] == "published" and row["properties"].get("message_id")]


def values_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the headers as values of AMQP."""
    return {name: None if one["type"] == "void" else one["value"] for name, one in row["headers"].items()}


def properties_of(row: dict[str, Any]) -> commands.Basic.Properties:
    given = dict(row["properties"])
    return commands.Basic.Properties(headers=values_of(row), message_type=given.pop("type", None), **given)


async def publish(url: str, rows: Sequence[dict[str, Any]], exchange: str = "", key: str = "sales") -> None:
    """Publish the messages as they were recorded."""
    connection = await aio_pika.connect(url)
    channel = await (await connection.channel()).get_underlay_channel()
    for row in rows:
        body = base64.b64decode(row["body_base64"])
        await channel.basic_publish(body, exchange=exchange, routing_key=key, properties=properties_of(row))
    await connection.close()


@pytest.mark.parametrize("file", FILES)
async def test_recorded_messages_are_handled(rabbitmq_url: str, file: str) -> None:
    """Given every message that .NET has published, when an endpoint receives them, then handlers see all of each."""
    rows, seen = recorded(file), []
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        seen.append(message)

    await endpoint.setup()
    async with endpoint:
        await publish(rabbitmq_url, rows)
        await eventually_async(lambda: len(seen) == len(rows))
        assert await endpoint.transport.count("error") == 0  # type: ignore[attr-defined]
    by_content = sorted(seen, key=lambda one: (one.id, one.body))
    for row, message in zip(sorted(rows, key=_order), by_content, strict=True):
        assert message.body == base64.b64decode(row["body_base64"])
        expected = {name: "" if value is None else str(value) for name, value in values_of(row).items()}
        found = dict(message.headers)
        assert {name: found.get(name) for name in expected.keys() - UNSEEN} == {
            name: value for name, value in expected.items() if name not in UNSEEN
        }


def _order(row: dict[str, Any]) -> tuple[str, bytes]:
    shown = row["headers"].get(Headers.MESSAGE_ID, {}).get("value")
    return shown or row["properties"]["message_id"], base64.b64decode(row["body_base64"])


@pytest.mark.parametrize("file", FILES[:2])
async def test_failed_messages_are_as_dotnet_writes_them(rabbitmq_url: str, file: str) -> None:
    """Given a message that failed at .NET, when the same fails here, then the error queue has the same headers."""
    rows = recorded(file)
    theirs = next(values_of(row) for row in rows if Headers.FAILED_QUEUE in row["headers"])
    came = [row for row in rows if Headers.FAILED_QUEUE not in row["headers"]]
    endpoint = Endpoint("sales", transport=RabbitMQTransport(rabbitmq_url), recoverability=Recoverability(0))

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise ValueError("it fails here")

    await endpoint.setup()
    async with endpoint:
        await publish(rabbitmq_url, came)
        await eventually_async(lambda: failed_all(endpoint, len(came)))
    connection = await aio_pika.connect(rabbitmq_url)
    queue = await (await connection.channel()).get_queue("error")
    for _ in came:
        failed = await queue.get(timeout=5, no_ack=True)
        ours: dict[str, Any] = {name: value for name, value in failed.headers.items() if not name.startswith("x-")}
        assert failed.delivery_mode == 2
        assert {name for name, value in ours.items() if not isinstance(value, str)} == set()
        added = {name for name in theirs if _describes_failure(name)}
        assert {name for name in ours if _describes_failure(name)} - {Headers.EXCEPTION_HELP_LINK} == added
        assert (ours[Headers.FAILED_QUEUE], ours[Headers.PROCESSING_ENDPOINT]) == ("sales", "sales")
        assert Headers.RETRIES not in ours
        assert from_wire_time(ours[Headers.TIME_OF_FAILURE])
        assert uuid.UUID(hex=ours[Headers.HOST_ID])
    await connection.close()


async def failed_all(endpoint: Endpoint, number: int) -> bool:
    return bool(await endpoint.transport.count("error") == number)  # type: ignore[attr-defined]


def _describes_failure(name: str) -> bool:
    """Tell whether a header describes the failure; .NET's Exception.Data has no counterpart here."""
    about = (Headers.EXCEPTION_PREFIX, "NServiceBus.Processing", "$.diagnostics.host", "NServiceBus.FailedQ")
    return name.startswith((*about, "NServiceBus.TimeOfFailure")) and not name.startswith(EXCEPTION_DATA)


@pytest.mark.parametrize(
    ("file", "options", "exchange", "key"),
    [
        (FILES[0], "", "Contoso.Lab:Happened", ""),
        (FILES[1], "?topology=direct", "amq.topic", "Contoso-Lab-Happened"),
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
    table = json.loads((DATA / f"timeout-table-{product}.json").read_text())
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


async def _queued(endpoint: Endpoint, number: int) -> Any:  # noqa: ANN401
    transport: Any = endpoint.transport
    async with asyncio.timeout(20):
        while await transport.count("Py.Sink") < number:  # noqa: ASYNC110 - as it is seen
            await asyncio.sleep(0.05)
    for message in await transport.browse("Py.Sink", 100):
        yield message


EVERY: Final = [row for file in FILES for row in recorded(file)]


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


async def test_the_example_answers_dotnet(rabbitmq_url: str, tmp_path: Path) -> None:
    """Given the Python half of the example, when a command of .NET comes, then it is answered now and in a while."""
    [ping] = [row for row in recorded(FILES[0]) if row["properties"].get("type") == "Contoso.Lab.Ping"][:1]
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
