"""A new column of stored messages is kept everywhere once it is declared: two files of `src` change."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.integration.cold_rows import hold

from delayline import TransactionMode
from delayline.bulk import TwoTierStore
from delayline.bulk.fingerprint import Fingerprint
from delayline.delayed.arrow import MESSAGE_SCHEMA
from delayline.message import DelayedMessage, Message
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = Path(__file__).parents[2] / "src"
PROCESS = Path(__file__).parent / "new_column_process.py"
DUE = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
#: What a person writes to add a column of each kind: by file, the text before and the text behind it.
ADDED: Mapping[str, list[tuple[str, str]]] = {
    "message.py": [
        (
            "    number_of_retries: int = 0\n",
            """    priority: int | None = None
    tenant: str | None = None
    until: datetime | None = None
    note: bytes | None = None
""",
        )
    ],
    "delayed/columns.py": [
        (
            "    ] = 0\n",
            """
    priority: Annotated[Any, StoredColumn(ColumnKind.COUNT, nullable=True)] = None
    tenant: Annotated[Any, StoredColumn(ColumnKind.NAME, 40, nullable=True, journaled=True)] = None
    until: Annotated[Any, StoredColumn(ColumnKind.INSTANT, nullable=True)] = None
    note: Annotated[Any, StoredColumn(ColumnKind.BYTES, nullable=True)] = None
""",
        ),
        (
            "message.number_of_retries",
            ", message.priority, message.tenant, message.until and kept_instant(message.until), message.note",
        ),
        ("headers, body, retry_count", ", priority, tenant, until, note"),
        ("instant(due), retry_count", ", priority, tenant, until and instant(until), note"),
    ],
}


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def changed_sources(tmp_path: Path) -> Path:
    """Provide a copy of the package in which more columns are declared."""
    copy = tmp_path / "src"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, additions in ADDED.items():
        file = copy / "delayline" / name
        text = file.read_text(encoding="utf-8")
        for before, added in additions:
            assert text.count(before) == 1, f"{name}: {before!r}"
            text = text.replace(before, before + added)
        file.write_text(text, encoding="utf-8")
    return copy


@pytest.mark.slow
async def test_a_declared_column_is_kept_everywhere(url: str, changed_sources: Path, tmp_path: Path) -> None:
    # Given a store and a cold tier of today's delayline, each with a message
    store, cold = SqlDelayedMessageStore(url), tmp_path / "cold"
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(DelayedMessage(Message("older", {}, b""), "billing", DUE))
    await store.close()
    tiers = TwoTierStore(url, cold_tier=str(cold))
    await tiers.setup_infrastructure("cold")
    await tiers.initialize("cold", TransactionMode.RECEIVE_ONLY)
    await hold(tiers, ("older", DUE))
    await tiers.close()
    plain = {"id": ["a"], "destination": ["b"], "due": [DUE], "headers": [None], "body": [b"c"]}
    schema = pa.schema([MESSAGE_SCHEMA.field(name) for name in plain])
    fingerprint = Fingerprint.of(pa.RecordBatch.from_pydict(plain, schema))
    # When one with more columns, declared in two files, goes on with them
    assert len(ADDED) <= 6
    command = [sys.executable, PROCESS, url, cold, str(fingerprint)]
    environment = {**os.environ, "PYTHONPATH": str(changed_sources)}
    run = partial(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    done = await asyncio.to_thread(run)
    # Then every place keeps their values
    assert done.returncode == 0, done.stderr
