"""Promotion of files of a cold tier to a broker: some messages at a time, each recorded once the broker has it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.integration.cold_rows import hold, opened_tiers
from tests.integration.test_cold_tier import ids, put

from delayline.backends import DUPLICATE_ID, UNKNOWN_QUEUE
from delayline.bulk import TwoTierStore, promotion
from delayline.bulk.promotion import FilePromoter
from delayline.spi import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path

    import pyarrow as pa

    from delayline.bulk.cold_catalog import ColdFile

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
NUMBER = 25


class Broker:
    """Keeps the ids that it gets; refuses some, and fails after it has taken a message with a certain id."""

    def __init__(self, *, fails_after: str | None = None, refuses: Mapping[str, str] | None = None) -> None:
        self.got: list[str] = []
        self._fails_after = fails_after
        self._refuses = refuses or {}

    async def must_exist(self) -> None:
        """Do."""

    async def refusals(self, destinations: Sequence[str]) -> Mapping[str, str]:
        del destinations
        return {}

    async def writer(self, stack: AsyncExitStack) -> Broker:
        del stack
        return self

    async def deliver(self, messages: pa.RecordBatch) -> Mapping[int, str]:
        given = messages.column("id").to_pylist()
        self.got += [key for key in given if key not in self._refuses]
        if self._fails_after in given:
            raise ZeroDivisionError("fails on purpose")
        return {position: self._refuses[key] for position, key in enumerate(given) if key in self._refuses}


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoTierStore]:
    monkeypatch.setattr(promotion, "SENT_AT_ONCE", 10)
    async with opened_tiers(url, tmp_path) as store:
        yield store


async def held(store: TwoTierStore) -> ColdFile:
    [file] = await hold(store, *((f"m{number:02}", NOON + number * SECOND) for number in range(NUMBER)))
    return file


def promoter(store: TwoTierStore, url: str, job: int) -> FilePromoter:
    return FilePromoter(url, "sales.timeouts", schema=None, folder=store._folder, job=job)


async def send(store: TwoTierStore, url: str, file: ColdFile, broker: Broker, job: int = 1) -> None:
    await asyncio.to_thread(promoter(store, url, job).send, file, broker)


async def test_a_file_that_was_left_in_the_middle_is_sent_to_its_end(store: TwoTierStore, url: str) -> None:
    file = await held(store)
    assert await store.cancel("m03") is Outcome.DONE
    # Given a promotion that fails when the broker has the messages and this was not recorded yet
    failing = Broker(fails_after="m12")
    with pytest.raises(ZeroDivisionError):
        await send(store, url, file, failing)
    assert failing.got == [f"m{number:02}" for number in range(20) if number != 3]
    # Then those that it has, or may have, are not cancelled any more, and the others are
    assert await store.cancel("m05") is Outcome.NOT_PENDING
    assert await store.cancel("m15") is Outcome.NOT_PENDING
    assert await store.cancel("m23") is Outcome.DONE
    assert await store.reschedule("m24", NOON) is Outcome.DONE
    # When another goes on with it
    broker = Broker()
    await send(store, url, file, broker, job=2)
    # Then only those in doubt are sent again, and the rest once
    assert broker.got == [f"m{number:02}" for number in range(10, 23)]
    assert ids(await store.pending()) == ["m24"]
    counted = [await store._database.read(partial(store._catalog.promoted, job=job)) for job in (1, 2)]
    assert [(files, moved.published, moved.cancelled) for files, moved in counted] == [(0, 9, 1), (1, 13, 2)]
    # And nothing comes of sending it once more
    await send(store, url, file, broker, job=3)
    assert len(broker.got) == 13


async def test_what_the_broker_refuses_goes_to_the_store(store: TwoTierStore, url: str) -> None:
    file = await held(store)
    await put(store, ("m02", NOON))
    nowhere = UNKNOWN_QUEUE.format("billing")
    await send(store, url, file, Broker(refuses={"m01": nowhere, "m02": nowhere, "m11": DUPLICATE_ID}))
    assert ids(await store.pending()) == ["m02", "m01"]
    files, moved = await store._database.read(partial(store._catalog.promoted, job=1))
    assert (files, moved.published, moved.stored, moved.duplicates) == (1, NUMBER - 3, 1, 2)


async def test_two_at_once_send_a_file_once(store: TwoTierStore, url: str) -> None:
    file, broker = await held(store), Broker()
    await asyncio.gather(*(send(store, url, file, broker, job) for job in range(4)))
    assert sorted(set(broker.got)) == [f"m{number:02}" for number in range(NUMBER)]
    while await store.pending():
        await send(store, url, file, broker, job=5)
    assert len(broker.got) == NUMBER


async def test_a_file_goes_to_the_store_in_parts(
    store: TwoTierStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "ROWS_AT_ONCE", 10)
    file = await held(store)
    await put(store, ("m12", NOON))
    await store.cancel("m20")
    # Given a file of which a broker has the first messages
    with pytest.raises(ZeroDivisionError):
        await send(store, url, file, Broker(fails_after="m12"))
    # When the rest is stored
    await asyncio.to_thread(promoter(store, url, 2).store, file)
    # Then that is all but what was sent, is there or was cancelled
    expected = [f"m{number:02}" for number in range(10, NUMBER) if number != 20]
    assert sorted(ids(await store.pending())) == expected
    files, moved = await store._database.read(partial(store._catalog.promoted, job=2))
    assert (files, moved.stored, moved.duplicates, moved.cancelled) == (1, len(expected) - 1, 1, 1)
