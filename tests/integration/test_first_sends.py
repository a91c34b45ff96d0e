"""The first sends of a process, all at once: what has to be looked up first is looked up once for all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from delayline import Endpoint
from delayline.errors import BackendUnusable
from delayline.sql import SqlTransport
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

NUMBER = 300


@pytest.fixture(params=["sqlite", "postgresql_url", "mariadb_url"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/first.db" if request.param == "sqlite" else request.getfixturevalue(request.param)


class Checks:
    """Counts the checks of the tables, and fails them on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.error: Exception | None = None
        check = RequiredTables.check_upgraded

        def counted(tables: RequiredTables, connection: Connection) -> None:
            self.number += 1
            if self.error is not None:
                raise self.error
            check(tables, connection)

        monkeypatch.setattr(RequiredTables, "check_upgraded", counted)


async def test_the_first_sends_share_one_check_of_the_tables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a process that has not sent anything yet
    transport = SqlTransport(url)
    async with Endpoint("shop", transport=transport) as endpoint:
        checks = Checks(monkeypatch)
        # When it sends many messages at once, and one of the callers is cancelled
        sends = [asyncio.create_task(endpoint.send("shop", "x")) for _ in range(NUMBER)]
        await asyncio.sleep(0)
        sends[0].cancel()
        await asyncio.gather(*sends[1:])
        # Then the tables were checked once, and every message is there
        assert checks.number == 1
        assert await transport.count("shop") >= NUMBER - 1


async def test_a_failed_check_is_told_to_all_who_wait_and_repeated_by_the_next(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a database whose tables are refused
    transport = SqlTransport(url)
    async with Endpoint("shop", transport=transport) as endpoint:
        checks = Checks(monkeypatch)
        checks.error = BackendUnusable("another shape")
        # When many messages are sent at once
        results = await asyncio.gather(*(endpoint.send("shop", "x") for _ in range(NUMBER)), return_exceptions=True)
        # Then each of them is refused, after one check, or two for those that came during the first
        assert {type(result) for result in results} == {BackendUnusable}
        assert checks.number <= 2
        # And a later send checks again
        checks.error = None
        await endpoint.send("shop", "x")
        assert await transport.count("shop") == 1
