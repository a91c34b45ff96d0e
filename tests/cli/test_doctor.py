from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import Result, delayline_process
from tests.eventually import eventually

from delayline import BackendUnavailable, MemoryTransport, Message, SqlTransport
from delayline.clock import to_microseconds
from delayline.composition import endpoint_from
from delayline.doctor import State, Thresholds, _queue
from delayline.queue_states import states_of
from delayline.settings import Settings, load_settings
from delayline.timeouts import SqlTimeoutPersister, Timeout, TimeoutManagerDelivery
from delayline.transport import QueueState, TransportOperation

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence


NOBODY = "no process receives from it: start the endpoint of this name, with handlers"


OKS = {"ok": True, "problem": False, "not checked": None}


def findings(ran: Result) -> dict[str, tuple[bool | None, str]]:
    return {one["what"]: (OKS[one["state"]], one["text"]) for one in ran.document["findings"]}


@contextlib.contextmanager
def receiving(queue: str) -> Iterator[None]:
    """Hold the messages of a queue, as a process does that handles them."""
    holding, ending = threading.Event(), threading.Event()

    async def hold() -> None:
        transport = SqlTransport("sqlite:///delayline.db")
        await transport.start()
        receiver = await transport.receiver(queue)
        held = await receiver.receive(10)
        holding.set()
        await asyncio.to_thread(ending.wait)
        await receiver.release_many(held)
        await receiver.stop()
        await transport.stop()

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(asyncio.run, hold())
        try:
            assert holding.wait(60)
            yield
        finally:
            ending.set()
        end.result(60)


def overdue_by(age: timedelta) -> None:
    with sqlite3.connect("delayline.db") as connection:
        due = to_microseconds(datetime.now(UTC) - age)
        connection.execute('UPDATE "sales.timeouts" SET due = ?', [due])
    connection.close()


def test_everything_is_well(ready: Callable[..., Result]) -> None:
    ready("send", "billing", "x", "--delay", "1h")
    ran = ready("doctor", "--json")
    assert ran.code == 0
    assert ran.document["state"] == "ok"
    found = findings(ran)
    assert found["guarantee"][1].startswith("exactly once: SqlTransport")
    assert found["schema version"][1].startswith("5 ")
    assert (found["journal mode"], found["synchronous"]) == ((True, "wal"), (True, "FULL"))
    assert found["queue billing"] == (True, "0 messages; no process receives from it")
    assert found["pending"] == (True, "1 messages")
    assert found["overdue"][1].startswith("none; the next is due")
    lines = ready("doctor").out.splitlines()
    assert all(line.startswith("✓ ") for line in lines)


def test_the_guarantee_follows_the_mode(ready: Callable[..., Result]) -> None:
    for mode, promised in (("receive-only", "at least once"), ("none", "at most once")):
        assert findings(ready("doctor", "--json", "--transaction-mode", mode))["guarantee"][1].startswith(promised)


def test_a_pair_that_cannot_honour_the_mode_is_wrong(ready: Callable[..., Result]) -> None:
    ready("setup", "--url", "sqlite:///other.db")
    ran = ready("doctor", "--json", "--store-url", "sqlite:///other.db", "--transaction-mode", "transaction_scope")
    assert ran.code == 1
    ok, text = findings(ran)["guarantee"]
    assert not ok
    assert "TRANSACTION_SCOPE needs one transaction" in text


def test_without_setup_it_has_a_remedy_and_makes_nothing(run: Callable[..., Result]) -> None:
    ran = run("doctor")
    assert ran.code == 1
    assert "✗ connection" in ran.out
    assert "delayline setup" in ran.out
    assert not Path("delayline.db").exists()


def test_another_endpoint_is_not_set_up(ready: Callable[..., Result]) -> None:
    found = findings(ready("doctor", "--json", "--endpoint", "other"))
    assert found["queue other"][0] is False
    assert found["delayed messages"][0] is False
    assert "delayline setup" in found["delayed messages"][1]


def test_messages_without_a_dispatcher_are_reported(ready: Callable[..., Result]) -> None:
    ready("send", "billing", "x", "--delay", "1h", "--id", "late")
    overdue_by(timedelta(seconds=2))
    assert ready("doctor").code == 0
    overdue_by(timedelta(minutes=5))
    ran = ready("doctor", "--json")
    assert ran.code == 1
    ok, text = findings(ran)["overdue"]
    assert not ok
    assert re.match(r"1 messages; the oldest is late for billing, 5 min( \d+ s)? overdue", text), text
    assert "No process dispatches" in text


def test_thresholds_decide_about_the_exit_code(ready: Callable[..., Result]) -> None:
    """Given messages in queue and error queue, and an overdue one, when each has a limit, then it decides alone."""
    # Given
    for queue in ("sales", "sales", "error"):
        ready("send", queue, "x")
    ready("send", "billing", "x", "--delay", "1h")
    overdue_by(timedelta(seconds=30))
    at_limits = ("--max-errors", "1", "--max-overdue", "5m", "--max-queue", "2")
    # When
    assert ready("doctor").code == 1
    with receiving("sales"):
        assert ready("doctor", *at_limits).code == 0
        # Then
        for option, value, what in (
            ("--max-errors", "0", "queue error"),
            ("--max-queue", "1", "queue sales"),
            ("--max-overdue", "20s", "overdue"),
        ):
            ran = ready("doctor", *at_limits, option, value, "--json")
            assert ran.code == 1
            assert [one["what"] for one in ran.document["findings"] if one["state"] != "ok"] == [what]
    assert "1 messages, more than 0: see them" in ready("doctor", "--max-errors", "0").out


def test_messages_that_nobody_receives_are_reported(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    """Given messages in a queue, then it is well while a process receives, and no longer once that was killed."""
    Path("shop.py").write_text(SHOP)
    assert findings(ready("doctor", "--json"))["queue sales"] == (True, "0 messages; no process receives from it")
    ready("send", "sales", "x")
    unreceived = ready("doctor", "--json")
    assert unreceived.code == 1
    assert findings(unreceived)["queue sales"] == (False, f"1 messages; {NOBODY}")
    process = delayline_process("run", "shop:sales")
    processes.append(process)
    eventually(Path("handling").exists)
    ran = ready("doctor", "--json")
    assert (ran.code, findings(ran)["queue sales"]) == (0, (True, "1 messages; a process receives from it"))
    process.kill()
    process.wait(60)
    assert findings(ready("doctor", "--json"))["queue sales"] == (False, f"1 messages; {NOBODY}")


def test_a_queue_without_what_is_unknown_is_not_green() -> None:
    """Given a back end that cannot say who receives, as Azure's, or what is there, then that was not checked."""
    settings = Settings(endpoint="sales", url="sqlite:///x.db")

    def found(state: QueueState) -> tuple[State, str]:
        finding = _queue(state, settings, Thresholds())
        return finding.state, finding.text

    unknown = "whether a process receives from it is unknown"
    assert found(QueueState("sales", 0)) == (State.OK, f"0 messages; {unknown}")
    assert found(QueueState("sales", 3)) == (State.NOT_CHECKED, f"3 messages; {unknown}")
    assert found(QueueState("sales")) == (State.NOT_CHECKED, "how many messages it has is unknown")
    assert found(QueueState("error")) == (State.NOT_CHECKED, "how many messages it has is unknown")


async def test_a_transport_that_tells_no_states_is_counted() -> None:
    transport = MemoryTransport()
    await transport.setup_infrastructure(["sales"])
    await transport.dispatch([TransportOperation(Message("m", {}, b""), "sales")])
    assert await states_of(transport, ["sales", "nosuch"]) == {"sales": QueueState("sales", 1, paused=False)}


def test_without_an_answer_it_is_not_checked(ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a back end that no longer answers after the connection, then exit code 3, and 1 beside a problem."""

    async def silent(self: SqlTransport, queues: Sequence[str] | None) -> Sequence[QueueState]:
        raise BackendUnavailable("no answer within 10 s")

    monkeypatch.setattr(SqlTransport, "queue_states", silent)
    ran = ready("doctor", "--json")
    assert (ran.code, ran.document["state"]) == (3, "not checked")
    assert findings(ran)["queues"] == (None, "not looked at: no answer within 10 s")
    assert ready("doctor", "--without-management").code == 0
    ready("send", "billing", "x", "--delay", "1h")
    overdue_by(timedelta(minutes=5))
    ran = ready("doctor", "--json")
    assert (ran.code, ran.document["state"]) == (1, "problem")
    assert ready("doctor", "--without-management").code == 1


def test_a_paused_queue_is_a_problem(ready: Callable[..., Result]) -> None:
    for queue in ("sales", "billing"):
        ready("pause", queue)
        ran = ready("doctor", "--json")
        text = f"0 messages; it is paused: delayline resume {queue}; no process receives from it"
        assert (ran.code, findings(ran)[f"queue {queue}"]) == (1, (False, text))
        ready("resume", queue)
    assert ready("doctor").code == 0


def test_failed_messages_are_a_problem_from_the_first_on(ready: Callable[..., Result]) -> None:
    ready("send", "error", "x")
    ran = ready("doctor", "--json")
    text = "1 messages, more than 0: see them with delayline errors list"
    assert (ran.code, findings(ran)["queue error"]) == (1, (False, text))
    assert ready("doctor", "--max-errors", "1").code == 0


def test_of_thousands_of_queues_those_with_a_problem_are_shown(ready: Callable[..., Result]) -> None:
    """Given 3000 queues, of which one has messages that nobody receives, then it is shown, and not every other."""
    with contextlib.closing(sqlite3.connect("delayline.db")) as connection, connection:
        names = [(f"q{number:04}",) for number in range(3000)]
        connection.executemany("INSERT INTO delayline_queues (name) VALUES (?)", names)
    ready("send", "q2900", "x")
    ran = ready("doctor", "--json")
    found = findings(ran)
    assert ran.code == 1
    assert found["queue q2900"] == (False, f"1 messages; {NOBODY}")
    assert found["further queues"] == (True, "2900 more, of which none has a problem")
    assert sum(what.startswith("queue ") for what in found) == 2 + 100 + 1  # its own, some, and that with a problem


SHOP = """
import asyncio, pathlib
from delayline import Endpoint, SqlDelayedMessageStore, SqlTransport
URL = "sqlite:///delayline.db"
sales = Endpoint("sales", transport=SqlTransport(URL), delayed_delivery=SqlDelayedMessageStore(URL))
@sales.handler
async def handle(message, context):
    pathlib.Path("handling").touch()
    await asyncio.sleep(600)
"""


def test_numbers_are_fields(ready: Callable[..., Result]) -> None:
    """Given one overdue message of two, when it is examined, then queues, pending and overdue have numbers."""
    ready("send", "sales", "x")
    ready("send", "billing", "x", "--delay", "1h")
    overdue_by(timedelta(seconds=30))
    ready("send", "billing", "x", "--delay", "1h")
    numbers = {one["what"]: one["numbers"] for one in ready("doctor", "--json").document["findings"]}
    assert numbers["queue sales"] == {"messages": 1}
    assert numbers["pending"] == {"messages": 2}
    assert numbers["overdue"]["messages"] == 1
    assert 30 <= numbers["overdue"]["oldest_seconds"] < 300


@pytest.mark.parametrize("limit", [("--max-errors", "-1"), ("--max-overdue", "soon"), ("--max-queue", "many")])
def test_a_threshold_that_is_none_is_refused(ready: Callable[..., Result], limit: tuple[str, str]) -> None:
    assert ready("doctor", *limit).code == 2


def test_a_file_that_is_not_a_database_is_reported_in_one_line(ready: Callable[..., Result]) -> None:
    Path("text.db").write_text("this is no database" * 100)
    ran = ready("doctor", "--url", "sqlite:///text.db")
    assert ran.code == 1
    assert "not an SQLite database" in ran.out


def timeouts(folder: Path, *, after: timedelta) -> None:
    """Leave a timeout of the endpoint `sales` in the database, as its timeout manager did."""

    async def leave() -> None:
        persister = SqlTimeoutPersister(f"sqlite:///{folder}/delayline.db")
        await persister.setup_infrastructure("sales")
        await persister.open("sales")
        message = Message("m", {"NServiceBus.MessageId": "m"}, b"")
        await persister.add(Timeout(str(uuid.uuid4()), message, "billing", datetime.now(UTC) + after))
        await persister.close()

    asyncio.run(leave())


def test_a_timeout_manager_that_drains_is_reported(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    ready("setup", "--endpoint", "sales")
    # Then an empty one can be disabled
    ok, text = findings(ready("doctor", "--json"))["timeout manager"]
    assert ok
    assert text == (
        "empty. Set disable_timeout_manager = true; then these can be deleted: queue sales.Timeouts, "
        "queue sales.TimeoutsDispatcher, table sales_TimeoutData"
    )
    # When something waits
    timeouts(Path.cwd(), after=timedelta(hours=1))
    # Then it is well, but for one that is disabled
    ok, text = findings(ready("doctor", "--json"))["timeout manager"]
    assert ok
    assert text.startswith("1 timeouts wait, 0 messages are in its queues; the first is due")
    ran = ready("doctor", "--json", "--disable-timeout-manager", "yes")
    assert ran.code == 1
    assert "take disable_timeout_manager out" in findings(ran)["timeout manager"][1]
    # When one is overdue
    timeouts(Path.cwd(), after=timedelta(minutes=-5))
    ok, text = findings(ready("doctor", "--json"))["timeout manager"]
    assert not ok
    assert "No process dispatches" in text


def test_timeouts_without_a_time_are_named_and_do_not_keep_it_from_draining(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two rows without a time, as .NET's table may have them, and nothing else
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    ready("setup", "--endpoint", "sales")
    with contextlib.closing(sqlite3.connect("delayline.db")) as connection, connection:
        for name in ("first", "second"):
            row = (
                str(uuid.uuid4()),
                "billing",
                None,
                b"",
                None,
                json.dumps({"NServiceBus.MessageId": name}),
                "6.6.5.0",
            )
            connection.execute('INSERT INTO "sales_TimeoutData" VALUES (?, ?, ?, ?, ?, ?, ?)', row)
    # Then it is drained, its table stays, and doctor and pending name the rows
    ran = ready("doctor", "--json")
    assert ran.code == 1
    ok, text = findings(ran)["timeout manager"]
    assert (ok, "empty." in text, "table" in text) == (True, True, False)
    ok, text = findings(ran)["timeouts without a time"]
    assert not ok
    assert all(part in text for part in ("2 in table sales_TimeoutData", "first", "second", "delayline reschedule ID"))
    for words in (("pending", "--timeouts"), ("pending", "--timeouts", "--count")):
        said = ready(*words).out
        assert all(part in said for part in ("first", "second", "2 without a time", "delayline cancel ID")), said
        assert "no pending" not in said
    listed = json.loads(ready("pending", "--timeouts", "--json").out)["pending"]
    assert {entry["id"]: entry["due"] for entry in listed} == {"first": None, "second": None}
    assert "no pending messages" in ready("pending", "--timeouts", "--destination", "shipping").out
    # When one is deleted and the other one has got a time
    assert ready("cancel", "first", "--timeouts").code == 0
    assert ready("reschedule", "second", "--delay", "1h", "--timeouts").code == 0
    # Then it waits as any other
    ran = ready("doctor", "--json")
    assert "timeouts without a time" not in findings(ran)
    assert findings(ran)["timeout manager"][1].startswith("1 timeouts wait")


def test_a_timeout_manager_of_which_nothing_is_left(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    monkeypatch.setenv("DELAYLINE_DISABLE_TIMEOUT_MANAGER", "true")
    ok, text = findings(ready("doctor", "--json"))["timeout manager"]
    assert (ok, text) == (True, "empty and disabled; nothing of it is left")


def test_an_endpoint_drains_the_configured_timeout_manager(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    ready("setup", "--endpoint", "sales")
    timeouts(Path.cwd(), after=timedelta(seconds=-1))

    async def drained() -> None:
        async with endpoint_from(load_settings(flags={"endpoint": "sales"})) as endpoint:
            assert isinstance(endpoint.draining, TimeoutManagerDelivery)
            assert isinstance(endpoint.transport, SqlTransport)
            async with asyncio.timeout(20):
                while not await endpoint.transport.count("billing"):  # noqa: ASYNC110 - there is no notification
                    await asyncio.sleep(0.02)

    asyncio.run(drained())
    assert "empty." in findings(ready("doctor", "--json"))["timeout manager"][1]


def test_the_dry_run_of_draining_is_complete(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    # Given tables that an administrator has created from the output of the dry run
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    shown = run("setup", "--endpoint", "sales", "--queue", "billing", "--dry-run").out
    with sqlite3.connect("delayline.db") as connection:
        connection.executescript(shown)
    connection.close()
    timeouts(Path.cwd(), after=timedelta(seconds=-1))

    async def drained() -> None:
        settings = load_settings(flags={"endpoint": "sales"})
        async with endpoint_from(settings, setup_infrastructure=False) as endpoint:
            assert isinstance(endpoint.transport, SqlTransport)
            async with asyncio.timeout(20):
                while not await endpoint.transport.count("billing"):  # noqa: ASYNC110 - there is no notification
                    await asyncio.sleep(0.02)

    asyncio.run(drained())


def test_a_table_that_was_not_taken_over_yet_is_not_called_empty(
    ready: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a timeout in a table beside which nothing of delayline's was set up
    timeouts(Path.cwd(), after=timedelta(hours=1))
    with sqlite3.connect("delayline.db") as connection:
        connection.execute("DROP TABLE delayline_leases")
    connection.close()
    monkeypatch.setenv("DELAYLINE_TIMEOUTS_URL", "sqlite:///delayline.db")
    # Then
    ok, text = findings(ready("doctor", "--json"))["timeout manager"]
    assert not ok
    assert "run `delayline setup`" in text


def test_a_timeout_manager_is_set_up_examined_and_looked_into(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an endpoint whose delayed messages are kept by a timeout manager
    monkeypatch.setenv("DELAYLINE_TIMEOUT_MANAGER", "true")
    planned = run("setup", "--dry-run").out
    assert "sales_TimeoutData" in planned
    assert "sales.Timeouts" in planned
    assert '"sales.timeouts"' not in planned
    # When it is set up
    created = run("setup", "--json").document["queues"]
    assert created == ["sales", "error", "sales.Timeouts", "sales.TimeoutsDispatcher"]
    assert run("setup", "--dry-run").out == "nothing to do\n"
    # Then doctor is satisfied, and says nothing of a store
    ran = run("doctor", "--json")
    found = findings(ran)
    assert ran.code == 0, found
    assert "a timeout manager" in found["guarantee"][1]
    assert found["queue sales.Timeouts"] == (True, "0 messages; no process receives from it")
    assert found["queue sales.TimeoutsDispatcher"] == (True, "0 messages; no process receives from it")
    assert found["pending"] == (True, "0 messages")
    # And pending messages can be listed, cancelled and moved, as in a store
    assert run("send", "sales", "x", "--delay", "1h", "--id", "a").code == 0
    assert findings(run("doctor", "--json"))["queue sales.Timeouts"] == (False, f"1 messages; {NOBODY}")
    assert run("pending", "--json").document["pending"] == []


def test_an_inbox_and_an_outbox_from_settings(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    # Given an inbox in another file than queues and store
    monkeypatch.setenv("DELAYLINE_INBOX_URL", "sqlite:///rows.db")
    planned = run("setup", "--dry-run").out
    assert "CREATE TABLE delayline_inbox" in planned
    assert 'CREATE TABLE "sales.outbox"' in planned
    assert not (folder / "rows.db").exists()
    # When both are set up
    assert run("setup").code == 0
    # Then doctor knows them
    found = findings(run("doctor", "--json"))
    assert found["guarantee"][1].startswith("exactly once: SqlTransport with stored delayed delivery in RECEIVE_ONLY")
    assert found["outbox"] == (True, "none")
    # And says how long the oldest message has waited that no process forwards
    with contextlib.closing(sqlite3.connect("rows.db")) as connection, connection:
        kept = ("x//17", "billing", to_microseconds(datetime.now(UTC) - timedelta(minutes=5)), b"{}", b"")
        connection.execute(
            'INSERT INTO "sales.outbox" (id, destination, due, headers, body, retry_count) VALUES (?, ?, ?, ?, ?, 0)',
            kept,
        )
    ran = run("doctor", "--json")
    ok, text = findings(ran)["outbox"]
    assert (ran.code, ok) == (1, False)
    assert re.search(r"the oldest is x//17 for billing, 5 min( \d+ s)? overdue", text), text


def test_an_inbox_needs_a_sql_database(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYLINE_INBOX_URL", "amqp://broker")
    ran = run("setup")
    assert ran.code == 2
    assert "inbox" in ran.err
