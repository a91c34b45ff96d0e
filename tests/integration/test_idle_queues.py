"""Receivers that idle on one database look together: as often for three queues as for one."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

from tests.eventually import PATIENCE

from delayline.sql import SqlTransport

if TYPE_CHECKING:
    from pathlib import Path


async def test_messages_without_a_notification_are_found_by_one_query_for_all_queues(tmp_path: Path) -> None:
    # Given receivers on three queues that idle
    file, queues = tmp_path / "delayline.db", ["a", "b", "c"]
    transport = SqlTransport(f"sqlite:///{file}", poll_interval=timedelta(milliseconds=50))
    await transport.setup_infrastructure(queues)
    await transport.start()
    receivers = [await transport.receiver(queue) for queue in queues]
    receiving = [asyncio.create_task(receiver.receive(1)) for receiver in receivers]
    looks: list[object] = []
    looked = asyncio.Event()
    filled = transport._statements.filled.rows_each

    def counted(connection: object, **keys: object) -> object:
        looks.append(keys)
        looked.set()
        return filled(connection, **keys)  # type: ignore[arg-type]

    transport._statements.filled.rows_each = counted  # type: ignore[method-assign,assignment]
    await asyncio.wait_for(looked.wait(), PATIENCE)
    assert sorted(looks[0]["keys"]) == queues  # type: ignore[index]
    # When a message is put into one of them without a notification
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("INSERT INTO delayline_messages (queue, id, headers, body) VALUES ('b', 'm', '{}', '')")
    # Then it is received, and the others go on idling
    [received] = await asyncio.wait_for(receiving[1], PATIENCE)
    assert received.message.id == "m"
    assert [task.done() for task in receiving] == [False, True, False]
    for receiver in receivers:
        await receiver.stop()
    assert [await receiving[number] for number in (0, 2)] == [[], []]
    await transport.stop()
