"""Tables that another engine has distributed over servers, where locks and notifications do not hold."""

from __future__ import annotations

import asyncio
import json

import psycopg
import pytest
from click.testing import CliRunner
from tests.eventually import PATIENCE

from delayline import Endpoint, StoredDelivery
from delayline.cli import main
from delayline.errors import BackendUnusable
from delayline.sql import SqlDelayedMessageStore, SqlTransport

#: The columns of Citus' own list that matter.
LIST = 'CREATE TABLE pg_dist_partition (logicalrelid regclass NOT NULL, partmethod "char" NOT NULL)'


@pytest.fixture
async def set_up_url(postgresql_url: str) -> str:
    """A database with delayline's tables, and Citus' list of distributed ones, which is empty."""
    async with endpoint_at(postgresql_url):
        pass
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(LIST)
    return postgresql_url


def endpoint_at(url: str, *, sets_up: bool = True, send_only: bool = False) -> Endpoint:
    return Endpoint(
        "sales",
        transport=SqlTransport(url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
        setup_infrastructure=sets_up,
        send_only=send_only,
    )


def distribute(url: str, table: str, schema: str = "public") -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"INSERT INTO pg_dist_partition VALUES ('{schema}.{table}'::regclass, 'h')".encode())  # noqa: S608


@pytest.mark.parametrize("sets_up", [True, False])
@pytest.mark.parametrize("table", ["delayline_messages", "delayline_queues", "delayline_sleeping", '"sales.timeouts"'])
async def test_an_endpoint_refuses_to_start_on_them(set_up_url: str, table: str, sets_up: bool) -> None:
    distribute(set_up_url, table)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BackendUnusable, match=r"has distributed '.*' over several servers"):
            await endpoint_at(set_up_url, sets_up=sets_up).start()


@pytest.mark.parametrize("table", ["delayline_messages", '"sales.timeouts"'])
def test_the_doctor_and_set_up_name_them(set_up_url: str, table: str) -> None:
    where = ("--endpoint", "sales", "--url", set_up_url)
    assert json.loads(CliRunner().invoke(main, ["doctor", *where, "--json"]).stdout)["state"] == "ok"
    distribute(set_up_url, table)
    examined = CliRunner().invoke(main, ["doctor", *where])
    assert examined.exit_code == 1
    assert table.strip('"') in examined.output.replace("\n", "")
    assert "distributed" in examined.output
    set_up = CliRunner().invoke(main, ["setup", *where])
    assert set_up.exit_code == 1
    assert "distributed" in set_up.output


async def test_tables_beside_may_be_distributed(set_up_url: str) -> None:
    with psycopg.connect(set_up_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int)")
        connection.execute("CREATE SCHEMA other")
        connection.execute("CREATE TABLE other.delayline_messages (id int)")
    distribute(set_up_url, "orders")
    distribute(set_up_url, "delayline_messages", "other")
    async with asyncio.timeout(PATIENCE), endpoint_at(set_up_url, send_only=True) as endpoint:
        await endpoint.send("sales", b"")
