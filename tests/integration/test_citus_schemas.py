"""Schemas of Citus, which is not installed here: three servers with tables like those of Citus' metadata.

Each query of delayline runs as with Citus. What Citus itself does is done by the tests: it routes no queries, and
`move` copies the rows of a schema before it changes the metadata.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.engine import make_url
from tests.conftest import running
from tests.eventually import eventually_async
from tests.servers.postgresql import PostgresqlServer

from delayline import Endpoint, Message, MessageContext
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import examine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METADATA = """
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_local_group (groupid int);
CREATE TABLE pg_catalog.pg_dist_node (groupid int, nodename text, nodeport int, noderole text);
CREATE TABLE pg_catalog.owners (schema text, groupid int);
CREATE VIEW pg_catalog.pg_dist_partition AS
  SELECT c.oid::regclass AS logicalrelid, 'n'::"char" AS partmethod, 's'::"char" AS repmodel
  FROM pg_class AS c JOIN pg_catalog.owners AS o ON o.schema = c.relnamespace::regnamespace::text WHERE relkind = 'r';
CREATE VIEW pg_catalog.pg_dist_shard AS
  SELECT logicalrelid, logicalrelid::oid::bigint AS shardid FROM pg_dist_partition;
CREATE VIEW pg_catalog.pg_dist_placement AS
  SELECT shardid, groupid FROM pg_dist_shard AS d JOIN pg_class AS c ON c.oid = d.shardid
  JOIN pg_catalog.owners AS o ON o.schema = c.relnamespace::regnamespace::text
"""
SCHEMA = "s1"
#: Handles a message until a file is there, and writes the ids of what it handles.
WORKER = """
import asyncio, os, sys
from delayline import Endpoint
url, released, handled = sys.argv[1:]
endpoint = Endpoint("sales", url=url, setup_infrastructure=False)

@endpoint.handler
async def handle(message, context):
    with open(handled, "a") as file:
        print(message.id, file=file)
    while message.body == b"slow" and not os.path.exists(released):
        await asyncio.sleep(0.05)

async def main():
    async with endpoint:
        await endpoint.wait_stopped()

asyncio.run(main())
"""


class Citus(NamedTuple):
    """A coordinator and two workers."""

    urls: list[str]

    @property
    def url(self) -> str:
        return f"{self.urls[0]}?citus_schema={SCHEMA}"

    def run(self, group: int, statement: str, *values: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.urls[group], autocommit=True, options=f"-c search_path={SCHEMA}") as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def queued(self, group: int) -> set[object]:
        return {row[0] for row in self.run(group, "SELECT id FROM delayline_messages")}

    def waiting(self, group: int) -> set[object]:
        return {row[0] for row in self.run(group, 'SELECT id FROM "sales.timeouts"')}

    def move(self, start: int, end: int) -> None:
        """Move the schema as `citus_schema_move` does: nobody writes while the metadata changes."""
        with psycopg.connect(self.urls[start]) as old, psycopg.connect(self.urls[end]) as new:
            for table in ("delayline_messages", "sales.timeouts"):
                name = sql.Identifier(SCHEMA, table)
                old.execute(sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(name))
                with (
                    old.cursor().copy(sql.SQL("COPY {} TO STDOUT").format(name)) as source,
                    new.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(name)) as target,
                ):
                    for data in source:
                        target.write(data)
            new.commit()
            for group in range(len(self.urls)):
                self.run(group, "UPDATE pg_catalog.owners SET groupid = %s", end)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[PostgresqlServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(PostgresqlServer, "fsync=off")) for _ in range(3)]


@pytest.fixture
async def citus(servers: list[PostgresqlServer]) -> Citus:
    """Return servers of which the first worker owns a schema."""
    name, urls = f"test_{uuid.uuid4().hex[:12]}", []
    for server in servers:
        with server.administrator() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        urls.append(f"postgresql://delayline@127.0.0.1:{server.port}/{name}")
    citus = Citus(urls)
    for group, url in enumerate(urls):
        citus.run(group, f"CREATE SCHEMA {SCHEMA}")
        own = f"{url}?options=-c%20search_path%3D{SCHEMA}"
        transport = SqlTransport(own)
        await transport.start()
        await transport.setup_infrastructure(["sales", "error"])
        await transport.stop()
        await SqlDelayedMessageStore(own).setup_infrastructure("sales")
        # The upper part of a row's number is the number of the server, as Citus gives them
        citus.run(group, "SELECT setval(pg_get_serial_sequence('delayline_messages', 'seq'), %s)", (group << 48) + 1)
        citus.run(group, """SELECT setval(pg_get_serial_sequence('"sales.timeouts"', 'seq'), %s)""", (group << 48) + 1)
        citus.run(group, METADATA)
        citus.run(group, "INSERT INTO pg_dist_local_group VALUES (%s)", group)
        citus.run(group, "INSERT INTO pg_catalog.owners VALUES (%s, 1)", SCHEMA)
        for number, node in enumerate(urls):
            place = make_url(node)
            citus.run(group, "INSERT INTO pg_dist_node VALUES (%s, %s, %s, 'primary')", number, place.host, place.port)
    return citus


async def test_an_endpoint_works_on_the_owner_of_its_schema(citus: Citus) -> None:
    # Given an endpoint whose URL names the coordinator, and a handler with rows of its own
    citus.run(1, "CREATE TABLE handled (id text)")
    endpoint = Endpoint("sales", url=citus.url)

    @endpoint.handler
    def handle(message: Message, context: MessageContext) -> None:
        context.transaction().execute(text("INSERT INTO handled VALUES (:id)"), {"id": message.id})

    async with endpoint:
        # When it keeps one message and handles another
        await endpoint.send("sales", b"", message_id="later", delay=timedelta(days=1))
        await endpoint.send("sales", b"", message_id="now", delay=timedelta(milliseconds=100))
        await eventually_async(lambda: citus.run(1, "SELECT id FROM handled") == [("now",)])
    # Then everything is on the worker, and doctor says so
    assert citus.waiting(1) == {"later"}
    assert citus.waiting(0) == set()
    findings = {subject: (right, said) for subject, right, said in await examine(citus.url)}
    right, said = findings["owner of the schema"]
    assert right
    assert f"owns schema '{SCHEMA}'" in said


@pytest.mark.timeout(120)
async def test_a_schema_is_moved_while_a_message_is_handled(
    citus: Citus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given two processes, of which one handles a message
    released, written = tmp_path / "released", tmp_path / "handled"
    handled: list[str] = []
    endpoint = Endpoint("sales", url=citus.url, setup_infrastructure=False)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, citus.url, released, written)
    try:
        sender = Endpoint("sales", url=citus.url, send_only=True, setup_infrastructure=False)
        async with sender:
            await sender.send("sales", b"slow", message_id="slow")
            await eventually_async(written.exists)

            @endpoint.handler
            async def handle(message: Message, context: MessageContext) -> None:
                handled.append(message.id)

            async with endpoint:
                # When the schema is moved
                with caplog.at_level(logging.WARNING):
                    citus.move(1, 2)
                    await eventually_async(
                        lambda: any(getattr(record, "event", None) == Event.SCHEMA_MOVED for record in caplog.records)
                    )
                # Then both go on there
                sent = [f"m{number}" for number in range(20)]

                async def is_handled() -> bool:
                    return {*handled, *written.read_text().split()} >= {*sent}

                for message_id in sent:
                    await sender.send("sales", b"quick", message_id=message_id)
                await eventually_async(is_handled)
                # And nobody else handles the message that was being handled
                released.touch()
                await eventually_async(lambda: citus.queued(2) == set())
    finally:
        worker.terminate()
        await worker.wait()
    everything = [*handled, *written.read_text().split()]
    assert sorted(everything) == sorted(["slow", *sent])


async def test_a_schema_that_is_not_distributed_is_refused(citus: Citus) -> None:
    citus.run(0, "DELETE FROM pg_catalog.owners")
    with pytest.raises(BackendUnusable, match="not in a schema that Citus has distributed"):
        await SqlDelayedMessageStore(citus.url).setup_infrastructure("sales")


async def test_a_distributed_schema_without_its_name_is_refused(citus: Citus) -> None:
    own = f"{citus.urls[1]}?options=-c%20search_path%3D{SCHEMA}"
    with pytest.raises(BackendUnusable, match="add \\?citus_schema=NAME to the URL of the coordinator"):
        await SqlDelayedMessageStore(own).setup_infrastructure("sales")


@pytest.mark.parametrize("query", ["citus_schema=a,b", 'citus_schema=a"b', "citus_schema=a&pgbouncer=true"])
def test_a_wrong_name_is_refused(query: str) -> None:
    with pytest.raises(ConfigurationError, match="citus_schema"):
        SqlTransport(f"postgresql://me@localhost/shop?{query}")
