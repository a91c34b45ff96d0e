"""Transactions of the user's whose connection is lost, or outdated, while a send looks where it leads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from tests.conftest import running
from tests.eventually import PATIENCE
from tests.servers.postgresql import PostgresqlServer

from delayline import BackendUnavailable, Endpoint
from delayline.sql import SqlTransport
from delayline.sql.dialect import TableIdentity
from delayline.sql.postgresql.catalog import PostgresqlCatalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Table


@pytest.fixture
def restarting() -> Iterator[PostgresqlServer]:
    """A server of the test's own, to restart."""
    with running(PostgresqlServer, "fsync=off") as server:
        yield server


def sending(url: str) -> Endpoint:
    return Endpoint("sales", transport=SqlTransport(url), send_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["psycopg", "sqlalchemy"])
async def test_a_server_that_restarts_meanwhile_is_no_other_database(
    restarting: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = restarting.new_database()
    await SqlTransport(url).setup_infrastructure(["sales"])
    looked: list[TableIdentity] = []
    identify = PostgresqlCatalog.identify

    def restarted(self: PostgresqlCatalog, connection: Connection, table: Table) -> TableIdentity:
        found = identify(self, connection, table)
        looked.append(found)
        if len(looked) == 1:  # the user's connection was asked, delayline's own will be
            restarting.stop("immediate")
            restarting.start()
        return found

    async with asyncio.timeout(2 * PATIENCE), sending(url) as endpoint:
        await endpoint.send("sales", b"", message_id="before")
        monkeypatch.setattr(PostgresqlCatalog, "identify", restarted)
        given: Any
        if kind == "psycopg":
            given = psycopg.connect(url)
        else:
            given = create_engine(url.replace("postgresql:", "postgresql+psycopg:")).connect()
        # When the server restarts between the two looks, then that is an outage, however the first call fails
        with pytest.raises(BackendUnavailable):
            await endpoint.send("sales", b"", transaction=given)
        with contextlib.suppress(DBAPIError):  # it ends its transaction first
            given.close()
        assert looked


def identities(*identities: object) -> Callable[..., TableIdentity]:
    """Answer the looks for a table's place, one after the other."""
    left = list(identities)

    def identify(self: PostgresqlCatalog, connection: Connection, table: Table) -> TableIdentity:
        del self, connection, table
        return TableIdentity("PostgreSQL database shop", left.pop(0), "1")

    return identify


async def test_a_primary_that_has_changed_since_our_connections_were_made_is_no_other_database(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a connection to the new primary, when ours still lead to the old one, then a new one decides."""
    await SqlTransport(postgresql_url).setup_infrastructure(["sales"])
    async with asyncio.timeout(PATIENCE), sending(postgresql_url) as endpoint:
        monkeypatch.setattr(PostgresqlCatalog, "identify", identities("new", "old", "new", "new"))
        with psycopg.connect(postgresql_url) as connection:
            await endpoint.send("sales", b"", message_id="m", transaction=connection)


async def test_a_connection_to_a_demoted_primary_is_an_outage(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await SqlTransport(postgresql_url).setup_infrastructure(["sales"])
    async with asyncio.timeout(PATIENCE), sending(postgresql_url) as endpoint:
        monkeypatch.setattr(PostgresqlCatalog, "identify", identities("old", "new", "old", "new"))
        with (
            psycopg.connect(postgresql_url, options="-c default_transaction_read_only=on") as connection,
            pytest.raises(BackendUnavailable, match="begin it on a new connection"),
        ):
            await endpoint.send("sales", b"", message_id="m", transaction=connection)
