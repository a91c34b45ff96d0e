"""Sums over messages: numbers, due times, destinations, and reasons of rejection. Made of counts only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from delayline.migration.rows import SourceRow, reasons_of, record_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from delayline.migration.collected import CollectedMessage, Selection


@dataclass(frozen=True)
class Bounds:
    """The limits that messages are checked against."""

    now: datetime
    latest: datetime | None
    """The last due time that the target accepts; None for no limit."""
    largest: int
    """Bytes that headers and body may have together."""
    bodies: bool
    """Whether to read everything, as a run does."""


@dataclass
class Counts:
    """The sums of an endpoint's messages."""

    rows: int = 0
    first: datetime | None = None
    last: datetime | None = None
    overdue: int = 0
    before_cutoff: int = 0
    too_far: int = 0
    destinations: Counter[str | None] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str | None] = field(default_factory=dict)
    unseen: int = 0
    """Number of further messages, which were not checked."""

    def span(self, first: datetime | None, last: datetime | None) -> None:
        """Take note of due times."""
        self.first = min((due for due in (self.first, first) if due is not None), default=None)
        self.last = max((due for due in (self.last, last) if due is not None), default=None)


class Tally:
    """Counts for each endpoint. Tasks send theirs to the driver, which adds them up."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Counts] = {}

    def of(self, endpoint: str) -> Counts:
        """Return an endpoint's counts."""
        return self.endpoints.setdefault(endpoint, Counts())

    def add(self, rows: Iterable[CollectedMessage], which: Selection, bounds: Bounds) -> None:
        """Count messages in that are asked for, and how many are due before."""
        mine: dict[str, list[CollectedMessage]] = {}
        for row in rows:
            if which.includes(row.due):
                mine.setdefault(row.endpoint, []).append(row)
            else:
                self.of(row.endpoint).before_cutoff += 1
        for endpoint, some in mine.items():
            _count(self.of(endpoint), some, bounds)

    def merge(self, further: Tally) -> None:
        """Add another tally's counts."""
        for endpoint, theirs in further.endpoints.items():
            counts = self.of(endpoint)
            counts.span(theirs.first, theirs.last)
            for name in ("rows", "overdue", "before_cutoff", "too_far", "unseen"):
                setattr(counts, name, getattr(counts, name) + getattr(theirs, name))
            counts.destinations += theirs.destinations
            counts.reasons += theirs.reasons
            counts.examples = theirs.examples | counts.examples


def _count(counts: Counts, rows: Sequence[CollectedMessage], bounds: Bounds) -> None:
    times = [row.due for row in rows if row.due is not None]
    counts.rows += len(rows)
    counts.overdue += sum(due < bounds.now for due in times)
    if bounds.latest is not None:
        counts.too_far += sum(due > bounds.latest for due in times)
    counts.span(min(times, default=None), max(times, default=None))
    counts.destinations.update(row.destination for row in rows)
    messages = record_batch([getattr(row, name) for name in SourceRow._fields] for row in rows)
    reasons: pa.Array = reasons_of(messages, largest=bounds.largest)
    for position in pc.indices_nonzero(pc.is_valid(reasons)).to_pylist():
        reason = reasons[position].as_py()
        counts.reasons[reason] += 1
        counts.examples.setdefault(reason, rows[position].id or rows[position].key)
