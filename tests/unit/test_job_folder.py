"""The files of jobs that are all or nothing have all that the ledger needs of their pieces."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.job_folder import JobFolder
from delayline.bulk.pieces import PieceRows
from delayline.delayed.arrow import MESSAGE_SCHEMA, completed
from delayline.errors import BackendUnusable, ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {3: Fingerprint(3, (1 << 64) - 1, 7), 5: Fingerprint(2, 2, 0)}


def piece_rows(*ids: str) -> PieceRows:
    columns = {
        "id": pa.array(ids, pa.string()),
        "destination": pa.array(["naïve 日本"] * len(ids), pa.string()),
        "due": pa.array([datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)] * len(ids), pa.timestamp("us", "UTC")),
        "headers": pa.array(["{}"] * len(ids), pa.string()),
        "body": pa.array([b"\x00\xff"] * len(ids), pa.binary()),
    }
    pieces = np.array([3, 5][: len(ids)], dtype=np.int32)
    return PieceRows(pa.RecordBatch.from_pydict(columns), pieces, np.array([3, 5]), np.array([3, 3]), INPUTS)


@pytest.mark.parametrize("ids", [("a", "b"), ()])
def test_pieces_are_read_as_they_were_written(tmp_path: Path, ids: tuple[str, ...]) -> None:
    # Given a file of pieces, of which there are messages or only rejected rows
    folder, given = JobFolder(f"file://{tmp_path}/jobs"), piece_rows(*ids)
    name = folder.write(7, given)
    # When another process reads it
    found = pickle.loads(pickle.dumps(folder)).read(name)  # noqa: S301 - our own
    # Then it has the same
    assert found.messages == completed(given.messages) and found.messages.schema.equals(MESSAGE_SCHEMA)
    assert [part.tolist() for part in (found.pieces, found.rejected, found.duplicates)] == [
        given.pieces.tolist(),
        [3, 5],
        [3, 3],
    ]
    assert found.inputs == INPUTS
    # And after the end of the job it is gone
    for _ in range(2):
        folder.clear(7)
    with pytest.raises(BackendUnusable, match=r"job_folder=.* name the folder of jobs that are all or nothing"):
        folder.read(name)


def test_a_folder_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="job_folder='gopher://jobs' cannot be used"):
        JobFolder("gopher://jobs")
