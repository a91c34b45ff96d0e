"""Messages that ServicePulse has sent to be retried: the notice that they were handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, Event, Headers, Message, TransactionMode
from delayline.memory import MemoryTransport
from delayline.message import from_wire_time
from delayline.testing import Signals
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from delayline import MessageContext

ACKNOWLEDGEMENTS = "Particular.ServiceControl"


def retried(queue: str | None = ACKNOWLEDGEMENTS) -> Message:
    headers = {Headers.RETRY_ID: "unique"}
    if queue is not None:
        headers[Headers.RETRY_ACKNOWLEDGEMENT_QUEUE] = queue
    return Message("m", headers, b"body")


class WithoutLookup(MemoryTransport):
    """Finds every queue, as a transport does when one is deleted before it is sent to."""

    async def has_queue(self, queue: str) -> bool:
        return True


async def handled(
    message: Message,
    *,
    fails: int = 0,
    transport: MemoryTransport | None = None,
    mode: TransactionMode = TransactionMode.RECEIVE_ONLY,
) -> MemoryTransport:
    """Let an endpoint handle the message, and return its transport."""
    attempts = 0
    transport = transport or MemoryTransport()
    endpoint = Endpoint("shop", transport=transport, transaction_mode=mode)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= fails:
            raise ValueError(attempts)
        context.send("sent", b"")

    await transport.setup_infrastructure([ACKNOWLEDGEMENTS, "shop", "sent"])
    async with endpoint:
        await transport.dispatch([TransportOperation(message, "shop")])
        await eventually_async(lambda: is_empty(transport))
    return transport


async def is_empty(transport: MemoryTransport) -> bool:
    return await transport.count("shop") == 0


async def test_a_retry_that_was_handled_is_acknowledged() -> None:
    """Given a message of ServicePulse, when it was handled in its second attempt, then one notice is sent."""
    transport = await handled(retried(), fails=1)
    [notice] = await transport.browse(ACKNOWLEDGEMENTS, 10)
    assert notice.body == b""
    assert notice.headers[Headers.RETRY_ID] == "unique"
    assert notice.headers["NServiceBus.ControlMessage"] == "True"
    assert from_wire_time(notice.headers[Headers.RETRY_SUCCESSFUL])
    assert await transport.count("sent") == 1


async def test_a_retry_that_fails_is_not() -> None:
    """Given a message of ServicePulse, when it fails for good, then no notice is sent."""
    transport = await handled(retried(), fails=99)
    assert await transport.count("error") == 1
    assert await transport.count(ACKNOWLEDGEMENTS) == 0


@pytest.mark.parametrize("queue", ["", "missing", "shop", "x" * 201, "a\0b"])
async def test_a_queue_that_cannot_be_notified_fails_nothing(queue: str) -> None:
    """Given an acknowledgement queue that is missing or our own, then the message is handled, and that is logged."""
    with Signals() as signals:
        transport = await handled(retried(queue))
    assert (await transport.count("error"), await transport.count("sent")) == (0, 1)
    [record] = signals.records(Event.RETRY_UNACKNOWLEDGED)
    assert len(record.getMessage()) < 700


@pytest.mark.parametrize("mode", list(TransactionMode))
async def test_a_queue_that_is_deleted_meanwhile_fails_nothing(mode: TransactionMode) -> None:
    """Given an acknowledgement queue that is gone when it is sent to, then the handler's sends are sent."""
    with Signals() as signals:
        transport = await handled(retried("missing"), transport=WithoutLookup(), mode=mode)
    assert (await transport.count("error"), await transport.count("sent")) == (0, 1)
    assert signals.count(Event.RETRY_UNACKNOWLEDGED) == 1


async def test_a_retry_without_a_queue_for_it_is_not_acknowledged() -> None:
    """Given a message that an older ServiceControl has sent to be retried, when handled, then nothing is logged."""
    with Signals() as signals:
        transport = await handled(retried(None))
    assert (await transport.count("error"), await transport.count("sent")) == (0, 1)
    assert signals.count(Event.RETRY_UNACKNOWLEDGED) == 0
