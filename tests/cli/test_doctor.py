from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cli.conftest import Ran

from delayline.clock import to_microseconds

if TYPE_CHECKING:
    from collections.abc import Callable


def findings(ran: Ran) -> dict[str, tuple[bool, str]]:
    return {one["what"]: (one["ok"], one["text"]) for one in ran.document["findings"]}


def overdue_by(age: timedelta) -> None:
    with sqlite3.connect("delayline.db") as connection:
        due = to_microseconds(datetime.now(UTC) - age)
        connection.execute('UPDATE "sales.timeouts" SET due = ?', [due])
    connection.close()


def test_everything_is_well(ready: Callable[..., Ran]) -> None:
    ready("send", "billing", "x", "--delay", "1h")
    ran = ready("doctor", "--json")
    assert ran.code == 0
    assert ran.document["healthy"]
    found = findings(ran)
    assert found["guarantee"][1].startswith("exactly once: SqlTransport")
    assert found["schema version"][1].startswith("2 ")
    assert (found["journal mode"], found["synchronous"]) == ((True, "wal"), (True, "FULL"))
    assert found["queue billing"] == (True, "0 messages")
    assert found["pending"] == (True, "1 messages wait")
    assert found["overdue"][1].startswith("none; the next is due")
    lines = ready("doctor").out.splitlines()
    assert all(line.startswith("✓ ") for line in lines)


def test_the_guarantee_follows_the_mode(ready: Callable[..., Ran]) -> None:
    for mode, promised in (("receive-only", "at least once"), ("none", "at most once")):
        assert findings(ready("doctor", "--json", "--transaction-mode", mode))["guarantee"][1].startswith(promised)


def test_a_pair_that_cannot_honour_the_mode_is_wrong(ready: Callable[..., Ran]) -> None:
    ready("setup", "--url", "sqlite:///other.db")
    ran = ready("doctor", "--json", "--store-url", "sqlite:///other.db", "--transaction-mode", "transaction_scope")
    assert ran.code == 1
    ok, text = findings(ran)["guarantee"]
    assert not ok
    assert "TRANSACTION_SCOPE needs one transaction" in text


def test_without_setup_it_says_what_to_do_and_makes_nothing(run: Callable[..., Ran]) -> None:
    ran = run("doctor")
    assert ran.code == 1
    assert "✗ connection" in ran.out
    assert "delayline setup" in ran.out
    assert not Path("delayline.db").exists()


def test_another_endpoint_is_not_set_up(ready: Callable[..., Ran]) -> None:
    found = findings(ready("doctor", "--json", "--endpoint", "other"))
    assert found["queue other"][0] is False
    assert found["delayed messages"][0] is False
    assert "delayline setup" in found["delayed messages"][1]


def test_messages_that_nobody_dispatches_are_wrong(ready: Callable[..., Ran]) -> None:
    ready("send", "billing", "x", "--delay", "1h", "--id", "late")
    overdue_by(timedelta(seconds=2))
    assert ready("doctor").code == 0
    overdue_by(timedelta(minutes=5))
    ran = ready("doctor", "--json")
    assert ran.code == 1
    ok, text = findings(ran)["overdue"]
    assert not ok
    assert text.startswith("1 messages; the oldest is late for billing, 5 min overdue")
    assert "Nobody dispatches" in text


def test_a_file_that_is_no_database_is_told_in_one_line(ready: Callable[..., Ran]) -> None:
    Path("text.db").write_text("this is no database" * 100)
    ran = ready("doctor", "--url", "sqlite:///text.db")
    assert ran.code == 1
    assert "not an SQLite database" in ran.out
