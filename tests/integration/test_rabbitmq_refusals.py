"""What RabbitMQ's delay levels refuse: each error says what to do, and nothing is half sent."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.eventually import eventually_async

from delayline import (
    Endpoint,
    InvalidDueTime,
    InvalidMessage,
    Message,
    MessageContext,
    QueueNotFound,
    Recoverability,
    Send,
)
from delayline.cli import main
from delayline.errors import BackendUnusable
from delayline.message import Headers
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq.infrastructure import DelayInfrastructure
from delayline.rabbitmq.levels import MAXIMUM_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.rabbitmq import RabbitmqServer

MINUTE = timedelta(minutes=1)
V2 = DelayInfrastructure.v2()


def endpoint_on(url: str, name: str = "sales", *, sets_up: bool = True) -> Endpoint:
    return Endpoint(
        name, transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery(), setup_infrastructure=sets_up
    )


async def kept(url: str) -> dict[str, int]:
    """Return the number of messages in each level, and in the endpoint's queue, that has any."""
    transport = RabbitMQTransport(url)
    await transport.start()
    try:
        names = ["sales", *(queue.name for queue in V2.queues)]
        return {name: number for name in names if (number := await transport.count(name))}
    finally:
        await transport.stop()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"headers": {1: "x"}}, InvalidMessage, "header 1: 'x' must be str to str"),
    ({"headers": {"x": 1}}, InvalidMessage, "header 'x': 1 must be str to str; convert it"),
    ({"headers": {"x" * 256: ""}}, InvalidMessage, "header name has 256 bytes in UTF-8, AMQP carries 255"),
    ({"headers": {"x": "y" * (1 << 17)}}, InvalidMessage, "bytes of headers, a frame of this broker holds"),
    ({"headers": {Headers.TIME_TO_BE_RECEIVED: "00:05:00"}}, InvalidMessage, "TimeToBeReceived set is not supported"),
    ({"destination": "s" * 200}, InvalidMessage, "200 bytes: delayed messages on RabbitMQ go to names of 1 to 199"),
    ({"destination": "sales.#"}, InvalidMessage, "pattern"),
    ({"destination": "nobody"}, QueueNotFound, "nobody"),
    ({"delay": timedelta(seconds=MAXIMUM_DELAY + 1)}, InvalidDueTime, r"'3106\.21:24:15'"),
    ({"delay": timedelta.max}, InvalidDueTime, "beyond year 9999"),
    ({"delay": -MINUTE}, InvalidDueTime, "is negative"),
    ({"delay": None, "deliver_at": datetime(9999, 12, 31, tzinfo=UTC)}, InvalidDueTime, r"'3106\.21:24:15'"),
    ({"delay": None, "deliver_at": datetime(2030, 1, 1)}, InvalidDueTime, "no time zone"),  # noqa: DTZ001
    ({"body": object()}, InvalidMessage, "cannot be written as JSON"),
]


async def test_bad_input_is_refused_and_nothing_is_sent(rabbitmq_url: str) -> None:
    async with endpoint_on(rabbitmq_url) as endpoint:
        for given, error, text in BAD:
            sent: dict[str, Any] = {"destination": "sales", "body": b"", "delay": MINUTE} | given
            with pytest.raises(error, match=text):
                await endpoint.send(**sent)
        assert await kept(rabbitmq_url) == {}
        # And the longest delay there is goes out after all that
        await endpoint.send("sales", b"", delay=timedelta(seconds=MAXIMUM_DELAY))
        assert await kept(rabbitmq_url) == {V2.level(27): 1}


TOO_LONG = timedelta(days=4000)
#: The calls that take a delay or due time, each made with a time that is too far away.
TOO_FAR: list[Callable[[MessageContext], object]] = [
    lambda context: context.send("sales", b"", delay=TOO_LONG),
    lambda context: context.send("sales", b"", deliver_at=datetime.now(UTC) + TOO_LONG),
    lambda context: context.send_many([Send("sales", b"", delay=TOO_LONG)]),
    lambda context: context.reply(b"", delay=TOO_LONG),
    lambda context: context.forward("sales", delay=TOO_LONG),
    lambda context: context.defer(TOO_LONG),
    lambda context: context.defer(deliver_at=datetime.now(UTC) + TOO_LONG),
]
#: The instant and the time until then are named, and no argument that was not given.
NAMED = r"a message due at '\d{4}-.*', in '(4000\.00:00:00|3999\.23:59:59\.\d+)', cannot wait in delay levels"


@pytest.mark.parametrize("number", range(len(TOO_FAR)))
async def test_a_handler_with_a_delay_too_long_fails_with_an_error_that_names_it(
    rabbitmq_url: str, number: int
) -> None:
    """Given a handler that delays a message for eleven years, then the reason names the time that it has given."""
    endpoint = endpoint_on(rabbitmq_url)
    endpoint.recoverability = Recoverability(0, delayed_retries=0)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        TOO_FAR[number](context)

    transport: Any = endpoint.transport
    async with endpoint:
        await endpoint.send("sales", b"")
        await eventually_async(lambda: is_there(transport, "error"))
        [failed] = await transport.browse("error", 10)
    assert re.search(NAMED, failed.headers[Headers.EXCEPTION_MESSAGE])


async def is_there(transport: Any, queue: str) -> bool:  # noqa: ANN401
    return bool(await transport.count(queue))


async def test_a_send_with_a_delay_too_long_raises_an_error_that_names_it(rabbitmq_url: str) -> None:
    """Given the ways to send from outside a handler, when the delay is too long, then the error names it."""
    async with endpoint_on(rabbitmq_url) as endpoint:
        for send in (
            lambda: endpoint.send("sales", b"", delay=TOO_LONG),
            lambda: endpoint.send("sales", b"", deliver_at=datetime.now(UTC) + TOO_LONG),
            lambda: endpoint.send_many([Send("sales", b"", delay=TOO_LONG)]),
        ):
            with pytest.raises(InvalidDueTime, match=NAMED):
                await send()
    arguments = ["send", "sales", "x", "--delay", "4000d", "--url", rabbitmq_url, "--endpoint", "sales"]
    ran = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert ran.exit_code
    assert re.search(NAMED, ran.output + str(ran.exception))
    assert "DoNotDeliverBefore" not in ran.output


PERMISSIONS = [
    ("configure", r"no configure permission on exchange 'nsb\.v2\.delay-level-27'"),
    ("write", r"no write permission on queue 'sales'"),
    ("read", r"no read permission on exchange 'sales'"),
]


@pytest.mark.parametrize(("refused", "text"), PERMISSIONS, ids=[name for name, _ in PERMISSIONS])
async def test_setting_up_names_the_permission_it_lacks(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, refused: str, text: str
) -> None:
    """Given a user with two of three rights, when an endpoint sets up, then the error names the third."""
    allowed = r"^(?!nsb\.v2\.).*" if refused == "configure" else "^$"
    user = rabbitmq.new_user(rabbitmq_url, **{refused: allowed})
    with pytest.raises(BackendUnusable, match=rf"{text} in virtual host .*set_permissions -p \w+ user_\w+ CONFIGURE"):
        await endpoint_on(user).start()


@pytest.mark.parametrize(
    ("permissions", "text"),
    [
        ({"write": r"^(?!nsb\.v2\.).*"}, r"may not write to exchange 'nsb\.v2\.delay-level-05'"),
        ({"read": r"^(?!nsb\.v2\.).*"}, r"no read permission on exchange 'nsb\.v2\.delay-delivery'"),
        ({"write": r"^nsb\.v2\..*"}, r"no write permission on exchange 'billing'"),
    ],
    ids=["write to the levels", "read from them", "bind the destination"],
)
async def test_a_delayed_send_that_is_not_permitted_sends_nothing(
    rabbitmq: RabbitmqServer, rabbitmq_url: str, permissions: dict[str, str], text: str
) -> None:
    # Given queues and levels, and a user who lacks one permission on them
    await endpoint_on(rabbitmq_url).setup()
    await RabbitMQTransport(rabbitmq_url).setup_infrastructure(["billing"])
    user = rabbitmq.new_user(rabbitmq_url, **permissions)
    # When it sends, then the error names it, and no message is stored
    async with endpoint_on(user, sets_up=False) as endpoint:
        with pytest.raises(BackendUnusable, match=text):
            await endpoint.send("billing", b"", delay=MINUTE)
    assert await kept(rabbitmq_url) == {}


async def test_a_broker_too_old_for_quorum_levels_is_reported(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a broker that says it is 3.9, which does not run here, when v2 is set up, then nothing is declared."""
    endpoint = endpoint_on(rabbitmq_url)
    transport = endpoint.transport
    assert isinstance(transport, RabbitMQTransport)

    async def old() -> tuple[int, ...]:
        return (3, 9, 27)

    monkeypatch.setattr(transport.connection, "version", old)
    with pytest.raises(BackendUnusable, match=r"has version 3\.9\.27: .* need 3\.10 or later.*use delays=v1"):
        await endpoint.start()
    looking = RabbitMQTransport(rabbitmq_url)
    await looking.start()
    with pytest.raises(QueueNotFound):
        await looking.count(V2.level(0))
    await looking.stop()
