"""Wake-ups inside one process, for servers that cannot tell others: those look for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.sql.listeners import Listeners

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection


class LocalNotifications:
    """Tells listeners in this process at once. Safe to call from any thread."""

    reach_others = False

    def __init__(self) -> None:
        self._listeners = Listeners()

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running event loop after each commit told on `channel`; return how to stop."""
        return self._listeners.add(channel, callback)

    def notify(self, channel: str, at: int = 0) -> None:
        """Tell every listener of `channel` in this process."""
        self._listeners.tell(channel, at)

    def knows(self, channel: str, schema: str | None) -> None:
        """No-op: no tables are used."""

    def sleeps(self, connection: Connection, channel: str, until: datetime | None) -> bool:
        """No-op: sleeping pollers are not registered."""
        del connection, channel, until
        return False

    def notify_in(self, connection: Connection, channel: str, at: int) -> None:
        """No-op: other processes poll."""

    def close(self) -> None:
        """No-op: there is no thread to end."""
