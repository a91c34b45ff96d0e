"""Backups with each server's own tools: what was pending is delivered after the restore."""

from __future__ import annotations

import asyncio
import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import Endpoint
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer

    from delayline import Message, MessageContext

pytestmark = pytest.mark.server


def endpoint_at(url: str, **settings: Any) -> Endpoint:  # noqa: ANN401
    store = SqlDelayedMessageStore(url)
    return Endpoint("billing", transport=SqlTransport(url), delayed_delivery=store, **settings)


async def fill(url: str) -> None:
    """Leave two messages in the queue and two in the store."""
    async with endpoint_at(url) as billing:
        for number in range(2):
            await billing.send("billing", "größer \0".encode(), message_id=f"queued {number}")
            delay = timedelta(milliseconds=1500)
            await billing.send("billing", b"\x00\xff", message_id=f"pending {number}", delay=delay)


async def deliver(url: str) -> list[tuple[str, bytes]]:
    """Run an endpoint without the right to create tables until four messages are handled."""
    billing, handled, done = endpoint_at(url, setup_infrastructure=False), [], asyncio.Event()

    @billing.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append((message.id, message.body))
        if len(handled) == 4:
            done.set()

    async with billing, asyncio.timeout(30):
        await done.wait()
    return sorted(handled)


EXPECTED = [
    *((f"pending {number}", b"\x00\xff") for number in range(2)),
    *((f"queued {number}", "größer \0".encode()) for number in range(2)),
]


def run(command: Sequence[str | Path], **settings: Any) -> None:  # noqa: ANN401
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **settings)
    assert done.returncode == 0, done.stderr


async def test_a_dump_of_postgresql_restores_all_messages(
    postgresql: PostgresqlServer, postgresql_url: str, tmp_path: Path
) -> None:
    """Given a dump of delayline's tables, when it is restored into an empty database, then all messages are handled."""
    # Given
    await fill(postgresql_url)
    tables = ["--table=delayline_*", '--table=*".timeouts"']
    dump = tmp_path / "delayline.dump"
    run([*postgresql.command("pg_dump"), "--format=custom", *tables, f"--file={dump}", postgresql_url])
    # When
    restored = postgresql.new_database()
    try:
        run([*postgresql.command("pg_restore"), "--clean", "--if-exists", f"--dbname={restored}", dump])
        # Then
        assert await deliver(restored) == EXPECTED
    finally:
        postgresql.drop_database(restored)


async def test_a_dump_of_mariadb_restores_all_messages(
    mariadb: MariadbServer, mariadb_url: str, tmp_path: Path
) -> None:
    """Given a dump of the database, when it is restored into an empty one, then all messages are handled."""
    # Given
    await fill(mariadb_url)
    dump = tmp_path / "shop.sql"
    source, result = mariadb_url.rsplit("/", 1)[1], f"--result-file={dump}"
    run([*mariadb_command("mariadb-dump", mariadb), "--single-transaction", result, source])
    # When
    restored = mariadb.new_database()
    try:
        with dump.open() as text:
            run([*mariadb_command("mariadb", mariadb), restored.rsplit("/", 1)[1]], stdin=text)
        # Then
        assert await deliver(restored) == EXPECTED
    finally:
        mariadb.drop_database(restored)


def mariadb_command(name: str, server: MariadbServer) -> list[str]:
    return [*server.command(name), "--protocol=tcp", "--host=127.0.0.1", f"--port={server.port}", "--user=delayline"]
