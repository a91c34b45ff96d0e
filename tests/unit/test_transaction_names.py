"""Names of prepared transactions, and what `doctor` says of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from delayline.sql.mariadb.two_phase import names_of, xid_of
from delayline.sql.transaction_names import finding, named_at, new_name

LOG, DATABASE = "0123456789abcdef", "0123456789ab"


def test_names_tell_when_they_were_given() -> None:
    """Given new names, then each is another, tells its time to the millisecond, and fits into the parts of an xid."""
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    names = {new_name(LOG, DATABASE) for _ in range(1000)}
    assert len(names) == 1000
    for name in names:
        at = named_at(name, before)
        assert at is not None
        assert before <= at <= datetime.now(UTC)
        assert max(map(len, xid_of(name))) <= 64
        assert "-".join(xid_of(name)) == name


@pytest.mark.parametrize("number", ["", "x", "ffffffffffffffffffffffffffffffff", "0" * 32, "é" * 12])
def test_names_of_another_make_tell_no_time(number: str) -> None:
    assert named_at(f"delayline-{LOG}-{DATABASE}-{number}", datetime.now(UTC)) is None


def test_findings_about_prepared_transactions() -> None:
    """Given prepared transactions, then young ones are counted, and one that is old or of unknown age is named."""
    names = [new_name(LOG, DATABASE) for _ in range(3)]
    now = datetime.now(UTC)  # after the times in the names
    assert finding([], now) == ("prepared transactions", True, "none")
    _, ok, text = finding(names, now - timedelta(seconds=5))  # a clock that is behind
    assert (ok, text) == (True, "3 of delayline's, the oldest for 0.0 s")
    _, ok, text = finding(names, now + timedelta(minutes=5))
    assert not ok
    assert text.startswith("3 of delayline's, the oldest for 5 min")
    assert min(names) in text
    _, ok, text = finding(["delayline-of-another-make"], now)
    assert not ok
    assert text.startswith("1 of delayline's: delayline-of-another-make. An endpoint with")


def test_xids_are_read_as_either_product_lists_them() -> None:
    """Given the lists of MariaDB and of MySQL, which sends hexadecimal digits, then the names are the same."""
    name = new_name(LOG, DATABASE)
    shared, number = xid_of(name)
    data = f"{shared}{number}".encode()
    of_others: list[tuple[int, int, int, bytes | str]] = [
        (1, 3, 1, b"\xff\x00\xfe\x80"),
        (7, len(shared), len(number), data),
        (1, 1, 0, "0xFF"),
        (1, 1, 0, b"x"),
    ]
    lists: tuple[bytes | str, ...] = (data, f"0x{data.hex().upper()}")
    for listed in lists:
        assert names_of([*of_others, (1, len(shared), len(number), listed)], "delayline-") == [name]
        assert names_of([(1, len(shared), len(number), listed)], name) == [name]
        assert names_of([(1, len(shared), len(number), listed)], "delayline-f") == []
