"""Wake-ups between processes that share a PostgreSQL database: LISTEN and NOTIFY, polling where they do not work."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import selectors
import threading
import time
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from delayline.events import Event, emit
from delayline.sql.dialects.server import run
from delayline.sql.listeners import Listeners

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from delayline.sql.dialects.postgresql import Postgresql
    from delayline.sql.server_database import ServerDatabase

logger = logging.getLogger(__name__)

PROBE_EVERY: Final = 30.0  # seconds between proofs that a notification still comes through
PROBE_WITHIN: Final = 5.0
POLL_EVERY: Final = 1.0  # seconds between looks while notifications do not come through


class Notifications:
    """Tells listeners in this process at once, those in others by NOTIFY. Safe to call from any thread."""

    def __init__(self, database: ServerDatabase, dialect: Postgresql) -> None:
        self._database = database
        self._dialect = dialect
        self.listeners = Listeners()
        self.me = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._untold: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self.wake, self._woken = os.pipe()
        self.closing = False

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop after each commit told on `channel`; return how to stop."""
        unsubscribe = self.listeners.add(channel, callback)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="delayline wake-ups", daemon=True)
                self._thread.start()
        os.write(self._woken, b"s")
        return unsubscribe

    def notify(self, channel: str, at: int = 0) -> None:
        """Tell every listener of `channel`; other processes a moment later, once for all that came meanwhile."""
        self.listeners.tell(channel, at)
        with self._lock:
            first = not self._untold
            self._untold[channel] = min(at, self._untold.get(channel, at))
        if first:
            self._database.spawn(self._tell_others)

    def close(self) -> None:
        """Stop listening."""
        self.closing = True
        os.write(self._woken, b"c")
        if self._thread is not None:
            self._thread.join()
        os.close(self.wake)
        os.close(self._woken)

    def spawn_probe(self) -> None:
        """Notify ourselves, to see whether it comes."""
        self._database.spawn(lambda: self.send({self.me: 0}))

    def _tell_others(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, {}
        self.send(untold)

    def send(self, untold: dict[str, int]) -> None:
        """Notify every process, this one included; on a worker thread."""
        session = self._database.session()
        try:
            session.run(lambda connection: self._send(connection, untold))
        finally:
            self._database.give_back(session)

    def _send(self, connection: Connection, untold: dict[str, int]) -> None:
        for channel, at in untold.items():
            run(connection, "SELECT pg_notify(%s, %s)", channel_name(channel), f"{self.me} {at}")

    def _listen(self) -> None:
        while not self.closing:
            try:
                with self._dialect.connect() as connection:
                    Listening(self, connection).run()
            except self._dialect.errors as error:
                text = "Notifications do not come any more, looking every %g s instead: %s"
                emit(logger, logging.WARNING, Event.LISTENING_LOST, text, POLL_EVERY, error)
            if not self.closing:
                self.listeners.tell_all()
                self._pause(POLL_EVERY)

    def _pause(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            if selector.select(seconds):
                os.read(self.wake, 1024)


class Listening:
    """One connection that listens, for as long as it lasts."""

    def __init__(self, owner: Notifications, connection: Connection) -> None:
        self._owner = owner
        self._connection = connection
        self._driver: Any = connection.connection.driver_connection
        self._channels: set[str] = set()
        self._probed = 0.0
        self._proven = True

    def run(self) -> None:
        """Listen until the owner closes; raises a driver's error when the connection is lost."""
        owner, selector = self._owner, selectors.DefaultSelector()
        with contextlib.closing(selector):
            selector.register(owner.wake, selectors.EVENT_READ)
            selector.register(self._driver.fileno(), selectors.EVENT_READ)
            run(self._connection, f'LISTEN "{channel_name(owner.me)}"')
            self._join()
            while not owner.closing:
                ready = {key.fd for key, _ in selector.select(self._patience())}
                if owner.wake in ready:
                    os.read(owner.wake, 1024)
                    self._join()
                if self._driver.fileno() in ready:
                    self._receive()
                if not ready:
                    self._probe()

    def _join(self) -> None:
        for channel in self._owner.listeners.channels - self._channels:
            run(self._connection, f'LISTEN "{channel_name(channel)}"')
            self._channels.add(channel)
            self._owner.listeners.tell(channel, 0)  # what was committed before we listened

    def _receive(self) -> None:
        names = {channel_name(channel): channel for channel in self._channels}
        for notification in self._driver.notifies(timeout=0):
            sender, at = notification.payload.split()
            channel = names.get(notification.channel)
            if channel is not None and sender != self._owner.me:
                self._owner.listeners.tell(channel, int(at))
            self._proven = True

    def _patience(self) -> float:
        return PROBE_EVERY if self._proven else POLL_EVERY

    def _probe(self) -> None:
        """Send ourselves a notification on another connection; until it comes, poll."""
        if not self._proven:
            self._owner.listeners.tell_all()
        if time.monotonic() - self._probed < PROBE_WITHIN:
            return
        self._proven, self._probed = False, time.monotonic()
        self._owner.spawn_probe()


@lru_cache(maxsize=1024)
def channel_name(channel: str) -> str:
    """Return PostgreSQL's name for a channel: short, and free of anything that needs quoting."""
    return f"delayline_{hashlib.blake2b(channel.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
