"""Files that cannot be used, now or ever: a clear error that names the file and the remedy, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayline import BackendUnavailable, ConfigurationError, Endpoint, StoredDelivery
from delayline.errors import BackendUnusable, NewerSchema
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delayline import Message, MessageContext

SCRIPT = Path(__file__).with_name("on_a_mount.py")
ON_TMPFS = "mount -t tmpfs -o size=7m tmpfs {folder} && exec {python} {script} full {folder}"
READ_ONLY = (
    "mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec {python} {script} start {folder}"
)


def in_namespace(command: str, folder: Path) -> dict[str, Any]:
    """Run the shell command in a new mount namespace; return the output of the script."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here: run as root, or allow user namespaces")
    filled = command.format(folder=folder, python=sys.executable, script=SCRIPT)
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", filled], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let another process hold the write lock meanwhile."""
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE')"
    code += "; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield
        finally:
            other.communicate(b"\n", timeout=10)


async def refused(endpoint: Endpoint, kind: type[Exception], *words: str) -> None:
    """Assert that the start fails with all these words, and leaves no thread behind."""
    before = set(threading.enumerate())
    with pytest.raises(kind) as caught:
        await endpoint.start()
    for word in words:
        assert word in str(caught.value)
    left = [thread.name for thread in threading.enumerate() if thread not in before and "delayline" in thread.name]
    assert left == []


async def test_a_directory(tmp_path: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    await refused(
        make_endpoint(url=f"sqlite:///{tmp_path}"), BackendUnusable, str(tmp_path), "is a directory", "name a"
    )


async def test_a_missing_folder(tmp_path: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    url = f"sqlite:///{tmp_path}/nowhere/delayline.db"
    await refused(make_endpoint(url=url), BackendUnusable, f"{tmp_path}/nowhere", "create")


async def test_no_place_beside_the_file(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    file.with_name("delayline.db-run").touch()
    await refused(make_endpoint(), BackendUnusable, "cannot create", "delayline.db-run", "make its folder writable")


async def test_not_a_database(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    text = "id,due\n" * 1000
    file.write_text(text)  # noqa: ASYNC240
    await refused(make_endpoint(), BackendUnusable, str(file), "not an SQLite database", "name another file")
    assert file.read_text() == text  # noqa: ASYNC240


async def test_a_damaged_database(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    async with make_endpoint():
        pass
    with file.open("r+b") as damaged:
        damaged.seek(100)
        damaged.write(os.urandom(4000))
    await refused(make_endpoint(), BackendUnusable, str(file), "damaged", "restore")


async def test_a_newer_schema(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    async with make_endpoint():
        pass
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE delayline_schema SET version = 99")
    await refused(make_endpoint(), NewerSchema, "99", "pip install --upgrade delayline")
    await refused(make_endpoint(setup_infrastructure=False), NewerSchema, "99", "pip install --upgrade delayline")


async def test_a_database_that_is_not_set_up(make_endpoint: Callable[..., Endpoint]) -> None:
    await refused(make_endpoint(setup_infrastructure=False), BackendUnusable, "does not exist", "delayline setup")
    # Nor for this endpoint, when it is for another
    async with make_endpoint("billing"):
        pass
    await refused(make_endpoint(setup_infrastructure=False), BackendUnusable, "orders.timeouts", "delayline setup")


def test_a_read_only_folder(tmp_path: Path) -> None:
    answer = in_namespace(READ_ONLY, tmp_path)
    assert answer["type"] == "BackendUnusable"
    assert f"{tmp_path}/delayline.db" in answer["error"]
    assert "writable" in answer["error"]


async def test_a_read_only_file_keeps_its_messages(tmp_path: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given a database with a message
    async with make_endpoint() as endpoint:
        sent = await endpoint.send("orders", b"", delay=timedelta(hours=1))
    # When its file system has become read only
    answer = in_namespace(READ_ONLY, tmp_path)
    # Then the endpoint says so, and the message is there when it is writable again
    assert answer["type"] == "BackendUnusable", answer
    assert "writable" in answer["error"]
    async with make_endpoint() as endpoint:
        assert [message.id for message in await endpoint.delayed.pending()] == [sent]


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    # When an endpoint sends until its disk is full, and its messages fall due meanwhile
    answer = in_namespace(ON_TMPFS, tmp_path)
    # Then the send that failed said so, and after space was freed everything stored before has arrived, once
    assert f"no space left to write {tmp_path}/delayline.db" in answer["error"]
    assert "free some" in answer["error"]
    assert answer["failed_while_full"]
    assert len(answer["kept"]) > 10
    assert answer["handled"] == answer["kept"]


async def test_locked_by_another_program(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given an endpoint that waits 0.2 s for locks
    endpoint = make_endpoint(url=f"sqlite:///{file}?timeout=0.2")
    async with endpoint:
        # When another process holds the write lock
        with locked(file):
            # Then a send fails, and says what to do; reading goes on
            with pytest.raises(
                BackendUnavailable,
                match=r"another process holds the write lock of .*end its transaction, or.*\?timeout=",
            ):
                await endpoint.send("orders", b"", message_id="refused", delay=timedelta(hours=1))
            assert list(await endpoint.delayed.pending()) == []
        # And afterwards everything works again
        await endpoint.send("orders", b"", message_id="kept", delay=timedelta(hours=1))
        assert [message.id for message in await endpoint.delayed.pending()] == ["kept"]


async def test_a_send_waits_for_a_short_lock(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    async with make_endpoint() as endpoint:
        with locked(file):
            sending = asyncio.create_task(endpoint.send("orders", b"", message_id="kept", delay=timedelta(hours=1)))
            await asyncio.sleep(0.2)
            assert not sending.done()
        await sending
        assert [message.id for message in await endpoint.delayed.pending()] == ["kept"]


async def test_messages_that_come_due_while_locked_arrive_afterwards(
    file: Path, make_endpoint: Callable[..., Endpoint]
) -> None:
    endpoint = make_endpoint(url=f"sqlite:///{file}?timeout=0.2")

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    with Signals() as signals:
        async with endpoint:
            # Given a message that is nearly due
            await endpoint.send("orders", b"", delay=timedelta(seconds=0.3))
            # When another process holds the write lock past its due time
            with locked(file):
                await signals.wait_for(Event.DISPATCH_FAILED)
            # Then it arrives, once, when the lock is free
            await signals.wait_for(Event.HANDLED)
            assert signals.count(Event.MOVED_TO_ERROR) == 0


async def test_a_file_that_is_deleted_while_in_use(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    async with make_endpoint() as endpoint:
        # Given a running endpoint whose file is deleted
        for path in file.parent.glob("delayline.db*"):
            if path.is_file():
                path.unlink()
        # Then a send for the deleted file fails
        with pytest.raises(BackendUnusable, match="deleted or replaced"):
            await endpoint.send("orders", b"", delay=timedelta(hours=1))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://", "names a file"),
        ("sqlite:///:memory:", "MemoryTransport"),
        ("sqlite:///x.db?timeout=soon", "timeout='soon'"),
        ("sqlite:///x.db?timeout=-1", "0 or more"),
        ("sqlite:///x.db?mode=ro", "unknown option 'mode'"),
        ("mongodb://host/x", "mongodb"),
        ("x.db", "sqlite:///file.db"),
        ("", "sqlite:///file.db"),
    ],
)
def test_urls_that_cannot_work(url: str, words: str) -> None:
    for part in (SqlTransport, SqlDelayedMessageStore):
        with pytest.raises(ConfigurationError) as caught:
            part(url)
        assert words in str(caught.value)


async def test_two_parts_of_a_deployment_that_do_not_meet(tmp_path: Path) -> None:
    # Given a destination that exists in another file only
    here, there = (f"sqlite:///{tmp_path}/{name}.db" for name in ("here", "there"))
    async with Endpoint("billing", transport=SqlTransport(there)):
        pass
    delivery = StoredDelivery(SqlDelayedMessageStore(here))
    with Signals() as signals:
        async with Endpoint("orders", transport=SqlTransport(here), delayed_delivery=delivery) as endpoint:
            # When a message for it falls due
            delay = timedelta(seconds=0.01)
            await endpoint.send("billing", b"", message_id="m", delay=delay, check_destination=False)
            await signals.wait_for(Event.MOVED_TO_ERROR)
            # Then it is in the error queue, at once
            assert await SqlTransport(here).count("error") == 1


@pytest.mark.parametrize("umask", [0o022, 0o000])
async def test_files_that_are_made_are_for_their_owner_alone(tmp_path: Path, umask: int) -> None:
    """Given no file, when an endpoint runs, then the new file has mode 0600; an existing file keeps its mode."""
    before = os.umask(umask)
    try:
        for name, rights in (("new.db", 0o600), ("shared.db", 0o660)):
            if name == "shared.db":
                (tmp_path / name).touch()
                (tmp_path / name).chmod(rights)
            url = f"sqlite:///{tmp_path}/{name}"
            delivery = StoredDelivery(SqlDelayedMessageStore(url))
            async with Endpoint("orders", transport=SqlTransport(url), delayed_delivery=delivery) as endpoint:
                await endpoint.send("orders", b"", delay=timedelta(days=1))
                found = rights_in(tmp_path, name)
                assert any(file.endswith(".claims") for file in found), found
                assert found[name] == rights
                assert all(mode & ~rights == 0 for mode in found.values()), found
                assert rights_in(tmp_path, f"{name}-run")[f"{name}-run"] & 0o007 == 0
    finally:
        os.umask(before)


def rights_in(folder: Path, name: str) -> dict[str, int]:
    """Return the modes of the database file and of the files beside it."""
    files = [folder / name, *folder.glob(f"{name}-wal"), *folder.glob(f"{name}-run/*.claims")]
    return {file.name: file.stat().st_mode & 0o777 for file in files}
