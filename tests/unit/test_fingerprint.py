"""Fingerprints of a job's input: the same for the same rows, other ones for others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

from delayline.bulk.fingerprint import Fingerprint  # noqa: E402 - needs both

if TYPE_CHECKING:
    import pyarrow

DUE = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def rows(*ids: str | None, **columns: Any) -> pyarrow.RecordBatch:  # noqa: ANN401 - values of any column
    number = len(ids)
    given = {"destination": "billing", "due": DUE, "headers": None, "body": b"x", **columns}
    kinds = {"due": pa.timestamp("us", "UTC"), "body": pa.binary()}
    return pa.record_batch(
        {
            "id": pa.array(ids, pa.string()),
            **{
                name: pa.array(value if isinstance(value, list) else [value] * number, kinds.get(name, pa.string()))
                for name, value in given.items()
            },
        }
    )


def test_order_and_division_do_not_matter() -> None:
    whole = rows(*(f"m{number}" for number in range(100)), body=[b"%d" % number for number in range(100)])
    backwards = whole.take(pa.array(range(99, -1, -1)))
    assert Fingerprint.of(whole) == Fingerprint.of(backwards)
    assert Fingerprint.of(whole) == Fingerprint.of(whole.slice(0, 7)).plus(Fingerprint.of(whole.slice(7)))
    assert Fingerprint.of(whole).plus(Fingerprint.of(whole.slice(0, 0))) == Fingerprint.of(whole)


def test_it_is_the_same_tomorrow_and_comes_back_from_its_text() -> None:
    found = Fingerprint.of(rows("a", None, headers='{"n":"1"}'))
    assert str(found) == "2-5fd113febfa23be5-2c1ec8b8f7e057f9"
    assert Fingerprint.parse(str(found)) == found


@pytest.mark.parametrize(
    "other",
    [
        rows("b", "a", body=[b"1", b"2"]),  # bodies exchanged
        rows("a", "b", body=[b"1", None]),
        rows("a", "b", body=[b"1", b"2"], due=DUE + timedelta(microseconds=1)),
        rows("a", "b", body=[b"1", b"2"], due=[DUE, None]),
        rows("a", "b", body=[b"1", b"2"], destination="shipping"),
        rows("a", "b", body=[b"1", b"2"], headers="{}"),
        rows("a", "b", body=[b"1", b"2"], headers=""),
    ],
)
def test_other_contents_leave_the_ids(other: pyarrow.RecordBatch) -> None:
    first, second = Fingerprint.of(rows("a", "b", body=[b"1", b"2"])), Fingerprint.of(other)
    assert first.ids == second.ids and first.contents != second.contents


@pytest.mark.parametrize("ids", [("a", "b", "b"), ("a", None), ("a", "None"), ("a", ""), ("ab", "")])
def test_other_ids_are_another_input(ids: tuple[str | None, ...]) -> None:
    first, second = Fingerprint.of(rows("a", "b")), Fingerprint.of(rows(*ids))
    assert first[:2] != second[:2] and first.contents != second.contents


def test_delays_count_from_the_beginning_of_the_job() -> None:
    later = timedelta(hours=3, microseconds=7)
    first = Fingerprint.of(rows("a", "b", due=[DUE, None]), since=1_000_000)
    second = Fingerprint.of(
        rows("a", "b", due=[DUE + later, None]), since=1_000_000 + later // timedelta(microseconds=1)
    )
    assert first == second
