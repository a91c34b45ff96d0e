"""Jobs in pieces whose near messages go to a broker: each part is recorded once the broker has it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pytest
from tests.integration.test_promotion import Broker
from tests.integration.test_staging import DUE, TABLE, empty, ids, rows, url

from delayline import ConfigurationError
from delayline.backends import DUPLICATE_ID, UNKNOWN_QUEUE
from delayline.bulk.fingerprint import Fingerprint
from delayline.bulk.jobs import JobName, JobState, PieceParameters
from delayline.bulk.level_pieces import LevelPieceWriter, parts_of
from delayline.bulk.pieces import PieceRows
from delayline.clock import to_microseconds
from delayline.errors import DifferentInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.bulk.jobs import Job, PieceCounts

__all__ = ["url"]
PIECES: Final = 4
PART: Final = 10
NEAR: Final = [f"m{number:02}" for number in range(25)]
HORIZON: Final = DUE + timedelta(hours=1)
PARAMETERS: Final = PieceParameters(0, PIECES, "keep", part=PART, far_from=to_microseconds(HORIZON))


@pytest.fixture
def writer(url: str) -> LevelPieceWriter:
    return LevelPieceWriter(url, TABLE, schema=None, folder=None)


def begun(writer: LevelPieceWriter) -> Job:
    return writer.open(JobName("nightly"), PARAMETERS)


def piece_of(near: Sequence[str], far: Sequence[str] = (), piece: int = 1) -> PieceRows:
    """Return a piece with its parts, in the order of its ids."""
    batch = pa.concat_batches([rows(*near), rows(*far, due=HORIZON)]).sort_by("id")
    parts = parts_of(np.full(batch.num_rows, piece, dtype=np.int32), PIECES, PART)
    inputs = {
        int(part): Fingerprint(int((parts == part).sum()), sum(map(hash_of, batch.filter(pa.array(parts == part))[0])))
        for part in dict.fromkeys(parts.tolist())
    }
    nothing = np.array([], dtype=np.int32)
    return PieceRows(batch, parts, nothing, nothing, inputs)


def hash_of(key: pa.Scalar) -> int:
    return int.from_bytes(key.as_py().encode()[-4:])


def send(writer: LevelPieceWriter, job: Job, given: PieceRows, broker: Broker) -> PieceCounts:
    return writer.send(job.number, given, broker, PARAMETERS.far_from, PART)


def test_rows_are_cut_into_parts_piece_by_piece() -> None:
    pieces = np.array([1, 1, 1, 1, 1, 3, 3])
    assert parts_of(pieces, PIECES, 2).tolist() == [1, 1, 5, 5, 9, 3, 3]
    assert parts_of(pieces, PIECES, 5).tolist() == pieces.tolist()
    assert parts_of(np.array([], dtype=np.int32), PIECES, 2).tolist() == []


def test_a_job_that_was_killed_before_a_part_was_recorded_sends_that_part_again(
    url: str, writer: LevelPieceWriter
) -> None:
    # Given a job that dies when the broker has the messages of its second part, and this was not recorded yet
    job, failing = begun(writer), Broker(fails_after="m12")
    with pytest.raises(ZeroDivisionError):
        send(writer, job, piece_of(NEAR, ["m03 far", "m13 far"]), failing)
    # Then the ledger has the first part, and its far message waits
    assert (failing.got, ids(url)) == ([*NEAR[:9], *NEAR[9:18]], ["m03 far"])
    open_job = begun(writer)
    assert (open_job.state, open_job.pieces) == (JobState.OPEN, 1)
    assert (open_job.committed.sent, open_job.committed.stored) == (9, 1)
    # When its messages have left, and other rows come in its place, they are refused and not sent
    asyncio.run(empty(url))
    broker = Broker()
    with pytest.raises(DifferentInput, match="the job 'nightly' has begun with another input: 1 of the parts"):
        send(writer, job, piece_of(["a", *NEAR], ["m03 far"]), broker)
    assert broker.got == []
    # When another goes on with it
    counts = send(writer, job, piece_of(NEAR, ["m03 far", "m13 far"]), broker)
    # Then only the part in doubt is sent again, and the rest once
    assert (broker.got, ids(url)) == (NEAR[9:], ["m13 far"])
    assert (counts.sent, counts.stored, counts.duplicates) == (16, 1, 0)
    # And the ledger has the sums, once
    done = writer.finish(job.number)
    assert (done.committed.sent, done.committed.stored, done.committed.rows) == (25, 2, 27)
    # And a task that was thought to be dead sends nothing any more
    assert send(writer, job, piece_of(NEAR), broker).sent == 0
    assert len(broker.got) == 16


def test_of_attempts_at_once_one_sends_each_part(url: str, writer: LevelPieceWriter) -> None:
    job, broker = begun(writer), Broker()

    def attempt(_: int) -> int:
        return send(LevelPieceWriter(url, TABLE, schema=None, folder=None), job, piece_of(NEAR), broker).sent

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(attempt, range(3))) == len(NEAR)
    assert sorted(broker.got) == NEAR
    assert writer.finish(job.number).committed.sent == len(NEAR)


def test_small_pieces_are_sent_together(writer: LevelPieceWriter) -> None:
    class Counting(Broker):
        async def deliver(self, messages: pa.RecordBatch) -> dict[int, str]:
            sizes.append(messages.num_rows)
            return dict(await super().deliver(messages))

    # Given three pieces of four messages each
    sizes, parts = (
        list[int](),
        [piece_of([f"{piece}-{number}" for number in range(4)], (), piece) for piece in (0, 1, 2)],
    )
    together = PieceRows(
        pa.concat_batches([part.messages for part in parts]),
        np.concatenate([part.pieces for part in parts]),
        parts[0].rejected,
        parts[0].duplicates,
        {piece: given for part in parts for piece, given in part.inputs.items()},
    )
    # Then the broker gets as many of them at a time as a part may have
    job = begun(writer)
    assert send(writer, job, together, Counting()).sent == 12
    assert (sizes, begun(writer).pieces) == ([8, 4], 3)


def test_messages_that_wait_already_or_are_refused_are_counted(url: str, writer: LevelPieceWriter) -> None:
    # Given a message near and one far that wait already
    other = writer.open(JobName("other"), PARAMETERS)
    writer.store(other.number, piece_of(["m00"], ["far"]), "keep")
    # When they come again, and the broker refuses others
    job, nowhere = begun(writer), UNKNOWN_QUEUE.format("billing")
    broker = Broker(refuses={"m01": nowhere, "m11": DUPLICATE_ID})
    counts = send(writer, job, piece_of(NEAR, ["far", "further"]), broker)
    # Then each is counted, and the reasons are kept
    assert broker.got == [key for key in NEAR if key not in {"m00", "m01", "m11"}]
    assert (counts.sent, counts.stored, counts.duplicates, counts.rejected) == (22, 1, 3, 1)
    done = writer.finish(job.number)
    assert (done.committed.sent, done.committed.stored) == (22, 1)
    assert (done.committed.duplicates, done.committed.rejected, done.refused) == (3, 1, {"m01": nowhere})
    assert ids(url) == ["far", "further", "m00"]


def test_a_job_goes_on_with_delay_levels_or_without_as_it_began(writer: LevelPieceWriter) -> None:
    assert begun(writer).parameters == PARAMETERS
    with pytest.raises(ConfigurationError, match="the job 'nightly' has begun with delay levels"):
        writer.open(JobName("nightly"), PieceParameters(0, PIECES, "keep"))
    writer.open(JobName("weekly"), PieceParameters(0, PIECES, "keep"))
    with pytest.raises(ConfigurationError, match="the job 'weekly' has begun without delay levels"):
        writer.open(JobName("weekly"), PARAMETERS)
