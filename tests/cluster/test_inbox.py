"""Endpoints with an inbox, killed before and after every step: each effect happens once, wherever the queues are."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.cluster.harness import WorkerFactory, new_seed
from tests.cluster.inbox_worker import PLACES, endpoints
from tests.cluster.worker import transport_at
from tests.eventually import PATIENCE, eventually

from delayline.clock import ONE_SECOND

if TYPE_CHECKING:
    from pathlib import Path

    from delayline import Endpoint

#: Where the queues are, and the rows.
LAYOUTS = [
    ("rabbitmq_url", "postgresql_url"),
    ("azure_url", "postgresql_url"),
    ("a file", "postgresql_url"),
    ("postgresql_url", "mariadb_url"),
    ("rabbitmq_url", "a file"),
]
#: Messages for each kill: no process must have handled them all before it dies.
MESSAGES_A_KILL = 12
ROUNDS = 4
STEPS = [(place, at) for place in PLACES for at in ("before", "after")]


class Rows:
    """The database of the handlers' rows."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url.replace("mariadb:", "mariadb+pymysql:"), poolclass=NullPool)
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (endpoint VARCHAR(20), number INTEGER)"))

    def effects(self) -> Counter[tuple[str, int]]:
        """How often each endpoint has written the row of each message."""
        with self._engine.begin() as connection:
            return Counter((row[0], row[1]) for row in connection.execute(text("SELECT endpoint, number FROM effects")))

    def kept(self) -> int:
        """How many sends wait in the outbox."""
        quoted = self._engine.dialect.identifier_preparer.quote("orders.outbox")
        with self._engine.begin() as connection:
            return int(connection.execute(text(f"SELECT COUNT(*) FROM {quoted}")).scalar() or 0)  # noqa: S608


async def send_all(url: str, rows: str, number: int) -> None:
    """Send the messages, each second twice."""
    transport = transport_at(url, ONE_SECOND)
    both = endpoints(transport, rows, claims_first=False)
    for endpoint in both:
        await endpoint.setup()
    sender = sender_like(both[0])
    async with sender:
        for first in range(0, number, 50):
            ids = [str(each) for each in range(first, min(first + 50, number))]
            await asyncio.gather(*(sender.send("orders", b"", message_id=each) for each in [*ids, *ids[::2]]))


def sender_like(endpoint: Endpoint) -> Endpoint:
    return type(endpoint)("shop", transport=endpoint.transport, send_only=True)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize(("queues", "rows"), LAYOUTS)
@pytest.mark.sample(2)
@pytest.mark.timeout(600)
def test_killed_before_and_after_every_step(
    request: pytest.FixtureRequest, factory: WorkerFactory, tmp_path: Path, queues: str, rows: str, number: int
) -> None:
    # Given messages, some of them twice
    chance = random.Random(new_seed())  # noqa: S311 - repeatable
    queues_url, rows_url = (
        f"sqlite:///{tmp_path / name}.db" if url == "a file" else request.getfixturevalue(url)
        for name, url in (("queues", queues), ("rows", rows))
    )
    database, messages = Rows(rows_url), MESSAGES_A_KILL * len(STEPS)
    asyncio.run(send_all(queues_url, rows_url, messages))
    settings = {
        "role": "once",
        "transport": queues_url,
        "rows": rows_url,
        "journal": str(tmp_path / "journal"),
        "claims_first": number % 2 == 1,
    }
    # When processes are killed at every step
    for place, at in chance.sample(STEPS, len(STEPS)):
        worker = factory.fork({**settings, "die": [place, at, chance.randint(1, 3)]})
        try:
            assert worker.ended(PATIENCE), f"was not killed {at} {place}; {log(tmp_path)}"
        finally:
            worker.close()
    before_the_last = database.effects()
    assert len(before_the_last) < 1.5 * messages, "there were too few messages for all these steps"
    # Then another finishes the work, and every effect has happened once
    worker = factory.fork(settings)
    try:
        expected = {("orders", each) for each in range(1, messages, 2)} | {("books", each) for each in range(messages)}
        eventually(lambda: set(database.effects()) == expected and not database.kept(), f"all effects; {log(tmp_path)}")
        worker.stop()
    finally:
        worker.close()
    assert database.effects() == Counter(expected)


def log(folder: Path) -> str:
    """The log of the workers, for a failing test."""
    path = folder / "journal.log"
    return path.read_text()[-4000:] if path.exists() else ""
