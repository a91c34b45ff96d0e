"""Notifications between processes: sent at once, never swept by mistake, never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.eventually import PATIENCE

from delayline.delayed.poller import Poller
from delayline.events import Event
from delayline.sql.notifications import LocalNotifications, Notifications
from delayline.sql.sqlite.notifications import READ_SIZE, RECORD, PipeNotifications
from delayline.testing import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from delayline import Endpoint, Message, MessageContext


LISTEN = """
import asyncio, pathlib, sys
from delayline.sql.sqlite.notifications import PipeNotifications
async def main():
    notifications = PipeNotifications(pathlib.Path(sys.argv[1]))
    notifications.subscribe("channel", lambda at: print("notified", at, flush=True))
    print("listening", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
SEND = """
import asyncio, datetime, sys
from delayline import Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport
async def main():
    url = "sqlite:///" + sys.argv[1]
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    async with Endpoint("orders", transport=SqlTransport(url), delayed_delivery=delivery) as endpoint:
        await endpoint.send("orders", b"", message_id="sooner", delay=datetime.timedelta(seconds=0.2))
asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "delayline.db-run"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def listener(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process listen."""
    with subprocess.Popen([sys.executable, "-c", LISTEN, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def pipes(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.wake"))


class Listener:
    """The notifications that a listener in this process has received."""

    def __init__(self, notifications: Notifications, channel: str = "channel") -> None:
        self.at: list[int] = []
        self._news = asyncio.Event()
        self.stop = notifications.subscribe(channel, self._note)

    def _note(self, at: int) -> None:
        self.at.append(at)
        self._news.set()

    async def next(self) -> int:
        async with asyncio.timeout(PATIENCE):
            await self._news.wait()
        self._news.clear()
        return self.at[-1]


async def test_a_send_signals_its_poller_once(
    make_endpoint: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an endpoint whose store notifies its poller
    signalled: list[datetime] = []
    signal_poller = Poller.signal

    def counted(poller: Poller, due: datetime) -> None:
        signalled.append(due)
        signal_poller(poller, due)

    monkeypatch.setattr(Poller, "signal", counted)
    endpoint = make_endpoint()
    with Signals() as signals:
        async with endpoint:
            await signals.wait_for(Event.SLEEPS)
            signalled.clear()
            # When it sends a delayed message
            due = datetime.now(UTC) + timedelta(hours=1)
            await endpoint.send("orders", b"", deliver_at=due)
    # Then its poller was signalled once
    assert signalled.count(due) == 1


async def test_a_poller_is_woken_by_another_process(file: Path, make_endpoint: Callable[..., Endpoint]) -> None:
    # Given a poller that sleeps until its cap, a minute from now
    endpoint = make_endpoint()

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        pass

    with Signals() as signals:
        async with endpoint:
            await endpoint.send("orders", b"", delay=timedelta(hours=1))
            await signals.wait_for(Event.SLEEPS)
            # When another process stores something earlier
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", SEND, str(file)], check=True, timeout=30)
            # Then it arrives, by a notification
            [record] = await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
            assert vars(record)["facts"]["message"].id == "sooner"
            assert signals.count(Event.WOKE) >= 1


async def test_another_process_is_reported(folder: Path) -> None:
    with listener(folder) as process:
        PipeNotifications(folder).notify("channel", 42)
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE)
        assert line == "notified 42\n"


async def test_pipes_of_killed_processes_are_swept(folder: Path) -> None:
    # Given one process that was killed before it had listeners, and one that was killed afterwards
    with listener(folder):
        pass
    assert len(pipes(folder)) == 1
    sender = PipeNotifications(folder)
    with listener(folder):
        sender.notify("channel")
        assert len(pipes(folder)) == 1, "the first was swept, the second is alive"
    # When a notification is sent
    sender.notify("channel")
    # Then nothing of either is left
    assert pipes(folder) == []
    sender.close()


async def test_a_listener_that_starts_at_the_same_moment_is_not_swept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that looks for dead pipes when a listener has created its pipe and does not read it yet
    sender, notifications, make = PipeNotifications(folder), PipeNotifications(folder), os.mkfifo

    def making(path: Path) -> None:
        make(path)
        sender.open()
        sender.notify("noise")

    monkeypatch.setattr(os, "mkfifo", making)
    # When it begins to listen
    listener = Listener(notifications)
    # Then its pipe is still there, and works
    assert len(pipes(folder)) == 1
    sender.notify("channel", 7)
    assert await listener.next() == 7
    notifications.close()
    sender.close()


async def test_listeners_come_and_go_during_notifications(folder: Path) -> None:
    # Given a process that sends notifications without a pause
    sender, enough = PipeNotifications(folder), threading.Event()

    def send() -> None:
        while not enough.is_set():
            sender.open()  # look at the folder every time
            sender.notify("noise")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(40):
            # When others begin to listen meanwhile
            notifications, other = PipeNotifications(folder), PipeNotifications(folder)
            listener = Listener(notifications)
            # Then they are notified
            other.notify("channel", 7)
            assert await listener.next() in (7, 0), "0 is for everybody: the noise has filled the pipe"
            notifications.close()
            other.close()
    finally:
        enough.set()
        thread.join()
        sender.close()
    assert pipes(folder) == []


@pytest.mark.parametrize("product", ["sqlite", "others"])
async def test_a_removed_listener_is_not_called_for_an_earlier_notification(folder: Path, product: str) -> None:
    # Given two listeners, and a notification of another thread, which waits for the next turn of the event loop
    pipes = PipeNotifications(folder)
    notifications: Notifications = pipes if product == "sqlite" else LocalNotifications()
    called: list[str] = []
    remove = notifications.subscribe("channel", lambda at: called.append("removed"))
    notifications.subscribe("channel", lambda at: called.append("kept"))
    thread = threading.Thread(target=notifications.notify, args=("channel", 7))
    thread.start()
    thread.join()
    # When one is removed
    remove()
    # Then only the other is called
    listener = Listener(notifications)
    notifications.notify("channel", 8)
    assert await listener.next() == 8
    assert "removed" not in called
    assert "kept" in called
    pipes.close()


@pytest.mark.parametrize("trouble", [errno.EMFILE, errno.ENFILE, errno.EACCES])
async def test_a_pipe_that_cannot_be_opened_is_not_swept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    # Given a listener, and a sender that is out of descriptors, or another user
    notifications, sender = PipeNotifications(folder), PipeNotifications(folder)
    listener = Listener(notifications)

    def failing(*arguments: Any, **settings: Any) -> int:  # noqa: ANN401
        raise OSError(trouble, os.strerror(trouble))

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", failing)
        # When it sends a notification
        sender.notify("channel")
    # Then the listener's pipe is still there, and works when the trouble is over
    assert len(pipes(folder)) == 1
    sender.open()
    sender.notify("channel", 7)
    assert await listener.next() == 7
    notifications.close()
    sender.close()


async def test_a_full_pipe_does_not_block(folder: Path) -> None:
    # Given a process that listens and stands still
    with listener(folder) as process:
        sender = PipeNotifications(folder)
        process.send_signal(signal.SIGSTOP)
        # When more notifications are sent than its pipe holds
        started = time.monotonic()
        for number in range(20_000):
            sender.notify("other channel", number)
        sender.notify("channel", 42)
        assert time.monotonic() - started < PATIENCE
        # Then no process was blocked, and the listener is notified of all messages when it continues
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE)
        assert line == "notified 0\n"
        sender.close()


def test_a_full_pipe_is_seen_as_full_even_where_pipes_are_small() -> None:
    # Linux gives a user with many pipes only one page for each
    assert os.sysconf("SC_PAGE_SIZE") >= READ_SIZE
    assert READ_SIZE % RECORD.size == 0


async def test_closing_ends_the_thread_and_removes_the_pipe(folder: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        notifications = PipeNotifications(folder)
        notifications.open()
        listener = Listener(notifications)
        notifications.notify("channel", 1)
        assert await listener.next() == 1
        listener.stop()
        notifications.close()
    assert pipes(folder) == []
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


async def test_a_listener_with_a_closed_loop_does_not_disturb_others(folder: Path) -> None:
    # Given a listener on a loop that has ended, and one that lives
    notifications = PipeNotifications(folder)

    async def listen() -> None:
        Listener(notifications)

    await asyncio.to_thread(asyncio.run, listen())
    listener = Listener(notifications)
    # When a notification is sent
    notifications.notify("channel", 7)
    # Then the living one is notified
    assert await listener.next() == 7
    notifications.close()
