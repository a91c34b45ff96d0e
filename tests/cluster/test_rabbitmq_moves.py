"""A killed move between delay levels loses nothing, and doubles only messages in flight."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE
from tests.integration.test_rabbitmq_infrastructure import a_channel
from tests.integration.test_rabbitmq_migration import V1, V2, conventional, put, taken

from delayline.clock import SystemClock
from delayline.message import to_wire_time
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.move import BATCH
from delayline.rabbitmq.admin.operations import create, pending

if TYPE_CHECKING:
    from aiormq.channel import Channel
    from tests.servers.rabbitmq import RabbitmqServer

MESSAGES = 2000


@pytest.mark.sample(1, group="RabbitMQ kills")
async def test_a_move_that_is_killed_loses_nothing(rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
    # Given many messages in v1's levels
    address = BrokerAddress.parse(rabbitmq_url)
    await create(address, V1)
    await create(address, V2)
    async with a_channel(rabbitmq_url) as channel:
        await conventional(channel, "sales")  # type: ignore[arg-type]
        await fill(channel)  # type: ignore[arg-type]

    # When the process that moves them is killed twice in the middle
    for part in (0.2, 0.6):
        mover = start_moving(rabbitmq_url)
        deadline = time.monotonic() + PATIENCE
        while sum(await pending(address, V2)) < part * MESSAGES:
            assert mover.poll() is None, mover.communicate()
            assert time.monotonic() < deadline, "it moves nothing"
        mover.kill()
        mover.communicate()

    # And one is left alone
    last = start_moving(f"{rabbitmq_url}?management={rabbitmq.management_url}")
    out, err = await asyncio.to_thread(last.communicate, timeout=60)
    assert last.returncode == 0, out + err

    # Then every message has moved, and at most two batches came twice, with their ids
    assert sum(await pending(address, V1)) == 0
    moved: Counter[bytes] = Counter()
    async with a_channel(rabbitmq_url) as channel:
        for queue in V2.queues:
            moved.update(bytes(one.body) for one in await taken(channel, queue.name))  # type: ignore[arg-type]
    assert len(moved) == MESSAGES
    assert sum(moved.values()) <= MESSAGES + 2 * BATCH


async def fill(channel: Channel) -> None:
    now = to_wire_time(SystemClock().now())
    for first in range(0, MESSAGES, 200):
        await asyncio.gather(*(put(channel, 50_000 + first + number, TimeSent=now) for number in range(200)))


def start_moving(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "delayline", "rabbitmq", "migrate", "--url", url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
