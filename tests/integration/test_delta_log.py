"""The cold tier as a Delta table: what the catalog lists is what DuckDB reads, whoever writes at the same time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest
from tests.integration.cold_rows import hold, opened_tiers
from tests.integration.delta_reader import ids_in_table

from delayline import TransactionMode
from delayline.bulk import TwoTierStore, delta_log
from delayline.bulk.cold_catalog import FileState
from delayline.bulk.cold_folder import ColdFolder
from delayline.bulk.delta_log import DeltaLog
from delayline.errors import BackendUnusable, MissingExtra

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from delayline.bulk.cold_catalog import ColdFile

NOON: Final = datetime(2030, 1, 2, 12, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)


@pytest.fixture
async def store(postgresql_url: str, tmp_path: Path) -> AsyncIterator[TwoTierStore]:
    async with opened_tiers(postgresql_url, tmp_path) as store:
        yield store


async def log_of(store: TwoTierStore) -> DeltaLog:
    tier = await store._database.write(store._catalog.create)
    return DeltaLog(ColdFolder(store._folder.path, tier))


async def update(store: TwoTierStore) -> int:
    """Bring the log up to date, as a job does at its end."""
    log, loop = await log_of(store), asyncio.get_running_loop()

    def held() -> list[ColdFile]:
        return asyncio.run_coroutine_threadsafe(store._database.read(store._catalog.list_files), loop).result()

    await asyncio.to_thread(log.create)
    return await asyncio.to_thread(log.update, held)


def read(store: TwoTierStore, where: str = "true") -> list[str]:
    return ids_in_table(store._folder.path, where)


async def retire(store: TwoTierStore, *files: ColdFile) -> None:
    names = [file.name for file in files]
    await store._database.write(partial(store._catalog.retire, names=names, state=FileState.PROMOTED))


async def test_the_table_has_the_files_of_the_catalog(store: TwoTierStore) -> None:
    # Given messages of three hours, of which one is cancelled
    first, second, third = await hold(store, *((f"m{number}", NOON + number * HOUR) for number in range(3)))
    await store.cancel("m1")
    # When the log is made
    assert await update(store) == 1
    # Then they are there, also the cancelled one, and files are chosen by hour and due time
    assert read(store) == ["m0", "m1", "m2"]
    assert read(store, f"due_hour = '{second.due_hour}'") == ["m1"]
    assert read(store, "due > TIMESTAMPTZ '2030-01-02 13:30:00Z'") == ["m2"]
    # And a log that is up to date is left as it is
    assert await update(store) == 1
    # When files leave the tier and others come
    await retire(store, first, third)
    await hold(store, ("new", NOON))
    # Then the next version has both, and no file was written again
    assert await update(store) == 2
    assert read(store) == ["m1", "new"]


async def test_jobs_and_a_merge_at_once_lose_nothing(store: TwoTierStore) -> None:
    await update(store)

    async def schedule(name: str) -> None:
        for number in range(4):
            await hold(store, (f"{name}{number}", NOON + number * HOUR))
            await update(store)

    async def merge() -> None:
        """Replace files by one with their messages, as a compaction does."""
        for turn in range(4):
            files = await store._database.read(store._catalog.list_files)
            before = {file.name for file in files[:2]}
            ids = [row.id for row in store._folder.rows(files[:2], {})]
            await retire(store, *(file for file in files if file.name in before))
            if ids:
                await hold(store, *((key, NOON + turn * HOUR) for key in ids))
            await update(store)

    # When two schedulers and a compaction commit at once
    await asyncio.gather(schedule("a"), schedule("b"), merge())
    # Then the log has what the catalog has, which is everything, once
    expected = sorted(f"{name}{number}" for name in "ab" for number in range(4))
    assert sorted(message.id for message in await store.pending()) == expected
    assert read(store) == expected


async def test_a_log_that_a_killed_job_left_behind_is_brought_up_to_date(store: TwoTierStore) -> None:
    await update(store)
    await hold(store, ("killed", NOON))
    assert read(store) == []
    await hold(store, ("next", NOON))
    assert await update(store) == 1
    assert read(store) == ["killed", "next"]
    # And a file that is missing is told
    await hold(store, ("gone", NOON))
    for file in await store._database.read(store._catalog.list_files):
        store._folder.delete(file.name, file.due_hour)
    with pytest.raises(BackendUnusable, match="is missing, but the catalog lists it"):
        await update(store)


async def test_stores_that_share_a_folder_share_a_table(store: TwoTierStore, tmp_path: Path) -> None:
    other = TwoTierStore(f"sqlite:///{tmp_path / 'other.db'}", cold_tier=store._folder.path)
    await other.setup_infrastructure("sales")
    await other.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await hold(store, ("ours", NOON))
    [theirs] = await hold(other, ("theirs", NOON))
    await asyncio.gather(update(store), update(other))
    assert read(store) == ["ours", "theirs"]
    await retire(other, theirs)
    await update(other)
    assert read(store) == ["ours"]
    await other.close()


async def test_the_missing_extra_is_named(store: TwoTierStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await update(store)
    log = await log_of(store)
    monkeypatch.setattr(delta_log, "find_spec", lambda name: None)
    works: list[Callable[[], object]] = [log.create, lambda: DeltaLog.of(log._folder)]
    for work in works:
        with pytest.raises(MissingExtra, match=r"Run: pip install 'delayline\[delta\]'"):
            work()
