"""The same jobs through spark-submit, on a master and two workers, with the wheel shipped to them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from tests.spark.cluster import WORKERS, Cluster
from tests.spark.stores import ENDPOINT, StoreAt

from delayline import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 2000


def test_jobs_run_on_a_cluster(store: StoreAt, tmp_path: Path) -> None:
    # Given a store with a journal, and files that every worker reaches
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing", "error", ENDPOINT]))
    source = tmp_path / "reminders"
    source.mkdir()
    for part in range(4):
        rows = [f"m{number},billing,2020-01-01T00:00:00Z,x" for number in range(part, ROWS, 4)]
        (source / f"{part}.csv").write_text("\n".join(["id,destination,due,body", *rows]) + "\n")
    place = ["--endpoint", ENDPOINT, "--url", store.url, "--json"]
    with Cluster(tmp_path) as cluster:
        # When they are scheduled, dispatched and audited
        done = cluster.submit("spark", "schedule", str(source), "--format", "csv", *place)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1])["stored"] == ROWS
        audited = cluster.submit("spark", "audit", str(tmp_path / "journal"), *place)
    # Then both workers had the wheel, and the audit knows every message: due long ago, and dispatched by nobody
    assert all(list(cluster.work(number).rglob("delayline-*.whl")) for number in range(WORKERS))
    totals = json.loads(audited.stdout.splitlines()[-1])
    assert (totals["scheduled"], totals["overdue"], totals["lost"]) == (ROWS, ROWS, 0), audited.stderr[-3000:]
