"""Row numbers of PostgreSQL that begin again, as after a cutover of logical replication, which copies no sequences."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from click.testing import CliRunner
from tests.eventually import PATIENCE, eventually_async

from delayline import BackendUnavailable, Endpoint, Message, MessageContext, Send, StoredDelivery
from delayline.cli import main
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A_MOMENT = timedelta(milliseconds=100)
FAR = timedelta(hours=1)
TABLES = ("delayline_messages", '"sales.timeouts"')


def restart(url: str) -> None:
    """Let rows be numbered from 1 again."""
    with psycopg.connect(url, autocommit=True) as connection:
        for table in TABLES:
            connection.execute(f"ALTER TABLE {table} ALTER COLUMN seq RESTART WITH 1".encode())


def endpoint_at(url: str, *, send_only: bool = False) -> Endpoint:
    delivery = StoredDelivery(SqlDelayedMessageStore(url), number_of_retries=0)
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, send_only=send_only)


@pytest.fixture
async def filled_url(postgresql_url: str) -> str:
    """A database in which rows wait, in a queue and in the store."""
    await SqlTransport(postgresql_url).setup_infrastructure(["parked", "sales"])
    async with endpoint_at(postgresql_url, send_only=True) as endpoint:
        for delay in (None, FAR):
            await endpoint.send_many([Send("parked", b"", delay=delay) for _ in range(150)])
    return postgresql_url


def command(url: str, *words: str, code: int = 0) -> dict[str, object]:
    where = ("--endpoint", "sales", "--url", url, "--json")
    result = CliRunner().invoke(main, [*words, *where], prog_name="delayline")
    assert result.exit_code == code, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


SENDS: dict[str, Callable[[Endpoint], Awaitable[object]]] = {
    "at once": lambda endpoint: endpoint.send("sales", b""),
    "many at once": lambda endpoint: endpoint.send_many([Send("sales", b"") for _ in range(3)]),
    "delayed": lambda endpoint: endpoint.send("sales", b"", delay=A_MOMENT),
    "many delayed": lambda endpoint: endpoint.send_many([Send("sales", b"", delay=FAR) for _ in range(200)]),
    "unless it waits": lambda endpoint: endpoint.send("sales", b"", delay=FAR, message_id="x", on_conflict="keep"),
}


@pytest.mark.parametrize("way", SENDS)
async def test_numbers_that_begin_again_while_an_endpoint_runs_are_mended(filled_url: str, way: str) -> None:
    async with asyncio.timeout(PATIENCE), endpoint_at(filled_url, send_only=True) as endpoint:
        await SENDS[way](endpoint)
        # When rows are numbered from 1 again, below those that wait
        restart(filled_url)
        # Then a send that finds it says what it was, at the most, and the next one is stored
        try:
            await SENDS[way](endpoint)
        except BackendUnavailable as error:
            assert "cutover" in str(error)
            assert "repeat it" in str(error)
        await SENDS[way](endpoint)


async def test_due_messages_arrive_although_numbers_begin_again(filled_url: str) -> None:
    endpoint, handled = endpoint_at(filled_url), set[str]()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.add(message.id)

    async with asyncio.timeout(PATIENCE), endpoint:
        sends = [Send("sales", b"", delay=timedelta(seconds=1), message_id=f"m{n}") for n in range(20)]
        await endpoint.send_many(sends)
        restart(filled_url)
        await eventually_async(lambda: len(handled) == 20, "messages arrive")
    assert await in_error_queue(filled_url) == 0


async def in_error_queue(url: str) -> int:
    transport = SqlTransport(url)
    await transport.start()
    try:
        return await transport.count("error")
    finally:
        await transport.stop()


def test_set_up_shows_and_mends_them_and_the_doctor_names_them(filled_url: str) -> None:
    assert command(filled_url, "setup", "--dry-run")["statements"] == []
    restart(filled_url)
    # When the doctor looks
    findings = command(filled_url, "doctor", code=1)["findings"]
    assert isinstance(findings, list)
    [finding] = [one for one in findings if one["what"] == "identities"]
    # Then it names the tables, and set-up shows what it will do, and does it
    assert "'delayline_messages', 'sales.timeouts'" in finding["text"]
    planned = command(filled_url, "setup", "--dry-run")["statements"]
    assert isinstance(planned, list)
    assert len(planned) == 2
    assert all("setval" in statement for statement in planned)
    command(filled_url, "setup")
    assert command(filled_url, "setup", "--dry-run")["statements"] == []
    # And the doctor finds nothing else but messages that no process receives
    findings = command(filled_url, "doctor", code=1)["findings"]
    assert isinstance(findings, list)
    assert [finding["what"] for finding in findings if finding["state"] != "ok"] == ["queue parked"]
    with psycopg.connect(filled_url) as connection:
        for table in TABLES:
            numbers = connection.execute(
                f"SELECT nextval(pg_get_serial_sequence('{table}', 'seq')) > max(seq) FROM {table}".encode()  # noqa: S608
            )
            assert numbers.fetchone() == (True,)


async def test_a_user_who_may_not_mend_them_is_told_who_can(filled_url: str) -> None:
    with psycopg.connect(filled_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS sender")
        connection.execute("CREATE ROLE sender LOGIN")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO sender")
    restart(filled_url)
    url = filled_url.replace("delayline@", "sender@")
    try:
        async with asyncio.timeout(PATIENCE), endpoint_at(url, send_only=True) as endpoint:
            for _ in range(2):
                with pytest.raises(BackendUnavailable, match="run `delayline setup` as the table's owner"):
                    await endpoint.send("sales", b"")
    finally:
        with psycopg.connect(filled_url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY sender")
            connection.execute("DROP ROLE sender")


async def test_a_transaction_of_the_users_is_told_too(filled_url: str) -> None:
    async with asyncio.timeout(PATIENCE), endpoint_at(filled_url, send_only=True) as endpoint:
        restart(filled_url)
        with pytest.raises(BackendUnavailable, match="repeat it"), psycopg.connect(filled_url) as connection:
            await endpoint.send("sales", b"", transaction=connection)
        with psycopg.connect(filled_url) as connection:
            await endpoint.send("sales", b"", transaction=connection)
