"""The files of jobs that are all or nothing: pieces that tasks have written, before it is decided to store them.

A file has some whole pieces: their messages, and in its metadata what else the ledger has to know of them.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.pieces import PieceRows
from delayline.bulk.shared_folder import SharedFolder
from delayline.delayed.arrow import completed

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDER: Final = "delayline_jobs"
PIECE: Final = "piece"
#: Key of the metadata of a file.
ABOUT: Final = b"delayline"


class JobFolder(SharedFolder):
    """Where the files of jobs are; pickled to tasks. Every method blocks.

    Raises:
        BackendUnusable: The folder cannot be read or written.
    """

    setting: ClassVar[str] = "job_folder"
    purpose: ClassVar[str] = "jobs that are all or nothing"

    def write(self, job: int, rows: PieceRows) -> str:
        """Write pieces; return the name of their file."""
        about = {
            "inputs": {piece: str(given) for piece, given in rows.inputs.items()},
            "rejected": _counts(rows.rejected),
            "duplicates": _counts(rows.duplicates),
        }
        pieces = pa.array(rows.pieces, pa.int32())
        table = pa.Table.from_batches([completed(rows.messages)]).append_column(PIECE, pieces)
        table = table.replace_schema_metadata({ABOUT: json.dumps(about).encode()})
        name = f"{job}/{uuid.uuid4().hex}.parquet"
        system, root = self._place
        with self._plainly(f"write to {self.path}"):
            system.create_dir(f"{root}/{FOLDER}/{job}", recursive=True)
            address = f"{root}/{FOLDER}/{name}"
            pq.write_table(table, address, filesystem=system, compression="zstd", compression_level=1)
            self.settle(address)
        return name

    def read(self, name: str) -> PieceRows:
        """Return the pieces of a file."""
        system, root = self._place
        with self._plainly(f"read {name} of {self.path}"):
            table = pq.read_table(f"{root}/{FOLDER}/{name}", filesystem=system, partitioning=None).combine_chunks()
        about = json.loads(table.schema.metadata[ABOUT])
        batches = table.to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
        return PieceRows(
            completed(batch),
            batch.column(PIECE).to_numpy(),
            _rows(about["rejected"]),
            _rows(about["duplicates"]),
            {int(piece): Fingerprint.parse(given) for piece, given in about["inputs"].items()},
        )

    def clear(self, job: int) -> None:
        """Delete the files of a job, if there are any."""
        system, root = self._place
        with self._plainly(f"delete files of {self.path}"), contextlib.suppress(FileNotFoundError):
            system.delete_dir(f"{root}/{FOLDER}/{job}")


def _counts(pieces: NDArray[Any]) -> dict[int, int]:
    numbers, counts = np.unique(pieces, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _rows(counts: dict[str, int]) -> NDArray[Any]:
    pieces = np.array([int(piece) for piece in counts], dtype=np.int64)
    return np.repeat(pieces, np.array(list(counts.values()), dtype=np.int64))
