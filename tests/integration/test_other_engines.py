"""Engines that only speak PostgreSQL's protocol, as a PostgreSQL whose functions answer like theirs."""

from __future__ import annotations

import logging
from datetime import timedelta

import psycopg
import pytest
from tests.eventually import eventually_async

from delayline import Endpoint, Message, MessageContext
from delayline.errors import BackendUnusable
from delayline.sql import SqlTransport

THEIRS = "?options=-c%20search_path%3Dtheirs,pg_catalog,public"


def pretend(url: str, version: str, *, locks: bool) -> str:
    """Return a URL of a database that has another version, and locks of sessions or only their functions."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA theirs")
        connection.execute(
            f"CREATE FUNCTION theirs.version() RETURNS text LANGUAGE sql AS $$ SELECT '{version}' $$".encode()
        )
        if not locks:
            connection.execute(
                "CREATE FUNCTION theirs.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS $$ SELECT true $$"
            )
    return url + THEIRS


async def test_an_engine_whose_locks_exclude_nobody_is_refused(postgresql_url: str) -> None:
    url = pretend(postgresql_url, "CockroachDB CCL v25.4.0 (x86_64-pc-linux-gnu)", locks=False)
    with pytest.raises(BackendUnusable, match=r"is CockroachDB CCL v25\.4\.0 .*keep no other session out"):
        await SqlTransport(url).start()


async def test_an_engine_with_locks_is_used_without_its_notifications(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = pretend(postgresql_url, "PostgreSQL 15.12-YB-2025.2.3.0-b1 on x86_64-pc-linux-gnu", locks=True)
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(
            """CREATE FUNCTION theirs.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'pg_notify is not supported' USING ERRCODE = '0A000'; END $$"""
        )
    handled, endpoint = list[str](), Endpoint("sales", url=url)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(message.id)

    # When messages are sent, also in a transaction of the user, without notifications
    with caplog.at_level(logging.WARNING):
        async with endpoint:
            await endpoint.send("sales", b"", message_id="delayed", delay=timedelta(milliseconds=200))
            theirs = await psycopg.AsyncConnection.connect(url)
            async with theirs, theirs.transaction():
                await endpoint.send("sales", b"", message_id="now", transaction=theirs)
            # Then they arrive, and nothing is reported again and again
            await eventually_async(lambda: sorted(handled) == ["delayed", "now"])
    assert [record.getMessage() for record in caplog.records] == []
