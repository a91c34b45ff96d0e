"""Work of a server's threads that does not come back: it is reported with its task, and given up."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import PATIENCE, eventually_async

from delayline import BackendUnavailable, SqlDatabase, SqlTransport
from delayline.sql.databases import database_at
from delayline.sql.server_database import ServerDatabase
from delayline.sql.session_claims import SessionClaims

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@pytest.fixture(params=["postgresql", "mariadb"])
async def database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServerDatabase]:
    monkeypatch.setattr("delayline.sql.overdue.CONNECTING", 0.5)
    named = SqlDatabase(request.getfixturevalue(f"{request.param}_url"), server_timeout=1)
    transport, database = SqlTransport(named), database_at(named)
    await transport.setup_infrastructure(["sales"])
    await transport.start()
    assert isinstance(database, ServerDatabase)
    yield database
    await transport.stop()


async def test_work_that_does_not_come_back_is_reported_and_given_up(
    database: ServerDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    # Given work that hangs on every thread, and work that waits for a thread
    hangs = threading.Event()
    names = [f"hangs {number}" for number in range(database.workers)]
    work = [asyncio.create_task(database.run(hangs.wait), name=name) for name in [*names, "delayline poller sales"]]
    # Then each caller gets an error in the end, and the log says before who waits
    try:
        async with asyncio.timeout(PATIENCE):
            ended = await asyncio.gather(*work, return_exceptions=True)
    finally:
        hangs.set()
    assert [type(error) for error in ended] == [BackendUnavailable] * len(work)
    for task in work:
        assert f"task '{task.get_name()}' has waited" in caplog.text
    # And the threads work again once they have come back
    assert await database.run(lambda: 1) == 1


async def test_work_that_comes_back_late_claims_nothing(
    database: ServerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a claim whose answer comes when nobody waits for it any more
    claims, late = database.claims("sales"), threading.Event()
    assert isinstance(claims, SessionClaims)
    exchange = claims.exchange

    def hangs(connection: Any, released: Sequence[int], rows: Sequence[int]) -> set[int]:  # noqa: ANN401
        locked = exchange(connection, released, rows)
        late.wait()
        return locked

    monkeypatch.setattr(claims, "exchange", hangs)
    with pytest.raises(BackendUnavailable):
        await database.run(partial(claims.take, [7], 1))
    monkeypatch.undo()
    # When it comes
    late.set()
    await eventually_async(lambda: not claims._in_use.locked())
    # Then the row is free for others
    assert not claims.holds(7)
    assert await database.run(partial(claims.take, [7], 1)) == [7]
