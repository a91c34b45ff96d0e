"""How the entries of a journal are shared out among tasks."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from delayline.bulk.journal_export import EntryRange
from delayline.errors import ConfigurationError
from delayline.spark.journal import LONGEST_RANGE, _checked, _shares


@pytest.mark.parametrize("partitions", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "runs",
    [
        [EntryRange(1, 1)],
        [EntryRange(1, 10), EntryRange(12, 12), EntryRange(14, 500_000)],
        [EntryRange(number, number) for number in range(1, 99, 2)],
    ],
)
def test_every_entry_is_in_one_share(runs: list[EntryRange], partitions: int) -> None:
    shares = _shares(runs, partitions)
    numbers = [number for share in shares for run in share for number in range(run.first, run.last + 1)]
    assert numbers == [number for run in runs for number in range(run.first, run.last + 1)]
    assert 1 <= len(shares) <= partitions
    sizes = [sum(run.entries for run in share) for share in shares]
    assert max(sizes) <= len(numbers) / partitions + LONGEST_RANGE


@pytest.mark.parametrize("path", ["", "/", "x" * 501])
def test_a_path_that_the_ledger_could_not_keep_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a path"):
        _checked(path)
