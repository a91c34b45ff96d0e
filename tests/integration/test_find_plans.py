"""Pages of searches read a range of an index: no search reads or sorts a whole table at once."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from delayline import DelayedMessage, Message, MessageFilter, TransactionMode
from delayline.searching import Search, open_places
from delayline.settings import Settings
from delayline.spi import TransportOperation
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.databases import database_at

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

SOON = datetime.now(UTC) + timedelta(hours=1)
ROWS = 2_000
SEARCHES = (
    MessageFilter(message_id="p7"),
    MessageFilter(message_id="p*"),
    MessageFilter(body="nowhere"),
    MessageFilter(correlation="nowhere"),
    MessageFilter(destination="mail", body="nowhere"),
    MessageFilter(destination="*ai*"),
)
EXPLAIN = {"SQLite": "EXPLAIN QUERY PLAN ", "PostgreSQL": "EXPLAIN ", "MariaDB": "EXPLAIN "}
#: What a plan says of a table that is read whole.
COSTLY = {
    "SQLite": r"SCAN (?!\(|anon|CONSTANT)",
    "PostgreSQL": r"Seq Scan",
    "MariaDB": r" (delayline_\w+|shop.timeouts) ALL ",
}


@pytest.fixture(params=["SQLite", "PostgreSQL", "MariaDB"])
def product(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(product: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if product == "SQLite":
        return f"sqlite:///{tmp_path}/delayline.db"
    return str(request.getfixturevalue(f"{product.lower()}_url"))


async def test_each_statement_of_a_search_reads_a_range(
    url: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given tables with rows and statistics
    monkeypatch.setattr("delayline.sql.searched_tables.FIRST_PAGE", 50)
    monkeypatch.setattr("delayline.sql.searched_tables.LARGEST_PAGE", 50)
    monkeypatch.setattr("delayline.sql.searched_tables.ROWS_FOR_AN_ID", 50)
    store, transport = SqlDelayedMessageStore(url, journal=True), SqlTransport(url)
    await store.setup_infrastructure("shop")
    await store.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    await transport.setup_infrastructure(["mail", "error"])
    for queue in ("mail", "error"):
        operations = [TransportOperation(Message(f"{queue}{each}", {}, b"x" * 200), queue) for each in range(ROWS)]
        await transport.dispatch(operations)
    for first in range(0, ROWS, 500):
        messages = [Message(f"p{each}", {}, b"x" * 200) for each in range(first, first + 500)]
        await store.store_many([DelayedMessage(message, "mail", SOON) for message in messages])
    database = database_at(url)
    await database.open()
    analyze = ["ANALYZE"]
    if product == "MariaDB":
        analyze = [f"ANALYZE TABLE {name}" for name in ("delayline_messages", "delayline_journal", "`shop.timeouts`")]
    for statement in analyze:
        await database.write(lambda connection, statement=statement: connection.execute(text(statement)))  # type: ignore[misc]
    # When the statements of searches are explained
    plans: dict[str, str] = {}

    def explain(connection: Connection, cursor: object, sql: str, parameters: Any, *_: object) -> None:  # noqa: ANN401
        del cursor
        if sql.startswith("SELECT") and re.search("delayline_messages|delayline_journal|shop.timeouts", sql):
            if "sqlite_master" in sql or "information_schema" in sql.lower() or "pg_catalog.pg_class" in sql:
                return
            own = connection.connection.cursor()
            own.execute(EXPLAIN[product] + sql, parameters)
            plans[sql] = "\n".join(" ".join(map(str, row)) for row in own.fetchall())
            own.close()

    connections: Any = database.dialect.connections
    engine = connections.engine
    event.listen(engine, "before_cursor_execute", explain)
    try:
        for wanted in SEARCHES:
            async with open_places(Settings(url=url)) as places:
                search = Search(places, wanted)
                number = 0
                async for _ in search.pages():
                    number += 1
                assert search.unsearched == []
    finally:
        event.remove(engine, "before_cursor_execute", explain)
        await database.close()
        await transport.stop()
        await store.close()
    # Then none of them reads a table whole, but what a page needs
    assert len(plans) > 10
    costly = [
        f"{sql}\n{plan}"
        for sql, plan in plans.items()
        if re.search(COSTLY[product], plan) and "WHERE" in sql  # of the first and the last row, a row is read
    ]
    assert not costly, "\n\n".join(costly)
