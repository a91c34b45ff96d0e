"""What real .NET endpoints wrote (tests/data/nservicebus), and what is read from a queue, as types and values."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aio_pika
from pamqp import commands
from tests.integration.rabbitmq_queues import own_channel
from tests.unit.amqp_fields import table_in, taken_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA: Final = Path(__file__).parents[1] / "data" / "nservicebus"
#: Options of a broker's URL by recording.
OPTIONS: Final = {
    "rabbitmq-v2-conventional": "",
    "rabbitmq-v2-direct": "?topology=direct",
    "rabbitmq-v1-conventional": "?delays=v1&queue_type=classic",
    "rabbitmq-v1-direct": "?delays=v1&queue_type=classic&topology=direct",
}
AMQP_TYPES: Final = {"S": "longstr", "V": "void", "I": "int32"}
DELAY: Final = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
#: The sender's or the broker's own business, which nothing passes on.
UNSEEN: Final = {
    "x-dotnet-pub-seq-no",
    "NServiceBus.Transport.RabbitMQ.ConfirmationId",
    "NServiceBus.Transport.RabbitMQ.UseNonPersistentDelivery",
    DELAY,
}

Types = dict[str, str]


class Seen(NamedTuple):
    """A message in a queue: where it was published to, its properties, and its headers' types and values."""

    exchange: str
    routing_key: str
    properties: dict[str, Any]
    types: Types
    values: dict[str, Any]
    body: bytes


def load(name: str) -> Any:  # noqa: ANN401
    return json.loads((DATA / f"{name}.json").read_text())


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the messages that .NET published."""
    rows: list[dict[str, Any]] = load(name)
    return [row for row in rows if row["event"] == "published" and row["properties"].get("message_id")]


def values_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the headers as values of AMQP."""
    return {name: None if one["type"] == "void" else one["value"] for name, one in row["headers"].items()}


def types_of(row: dict[str, Any]) -> Types:
    """Return the headers' types; integers whose type the recorder could not determine are int32."""
    kinds = {name: one["type"].removesuffix("32").replace("int", "int32") for name, one in row["headers"].items()}
    return {name: kind for name, kind in kinds.items() if not name.startswith("x-")}


def properties_of(row: dict[str, Any]) -> commands.Basic.Properties:
    given = dict(row["properties"])
    return commands.Basic.Properties(headers=values_of(row), message_type=given.pop("type", None), **given)


def body_of(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["body_base64"])


async def publish(url: str, rows: Sequence[dict[str, Any]], exchange: str = "", key: str = "sales") -> None:
    """Publish the messages as they were recorded."""
    connection = await aio_pika.connect(url)
    channel = await (await connection.channel()).get_underlay_channel()
    for row in rows:
        await channel.basic_publish(body_of(row), exchange=exchange, routing_key=key, properties=properties_of(row))
    await connection.close()


async def tap(url: str, exchanges: Sequence[str]) -> None:
    """Let the queue `tap` receive a copy of all that is published to these exchanges."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    queue = await channel.declare_queue("tap", durable=True)
    for exchange in exchanges:
        await queue.bind(exchange, "#")
    await connection.close()


async def look(url: str, queue: str) -> list[Seen]:
    """Return the messages of a queue, oldest first; they stay there."""
    seen = []
    async with own_channel(url) as channel:
        while (found := await channel.get(queue)) is not None:
            fields = taken_apart(table_in(found.encoded_properties))
            fields = {name: one for name, one in fields.items() if not name.startswith("x-")}  # the broker's
            properties = commands.Basic.Properties()
            properties.unmarshal(int.from_bytes(found.encoded_properties[:2], "big"), found.encoded_properties[2:])
            given = {name: value for name, value in properties if value and name != "headers"}
            types = {name: AMQP_TYPES.get(one.kind, one.kind) for name, one in fields.items()}
            values = {name: one.raw.decode() for name, one in fields.items() if one.kind in "SV"}
            seen.append(Seen(found.exchange, found.routing_key, given, types, values, found.body))
    return seen
