"""Limits on the waits of Engines that are made for handlers, the same as of delayline's own connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event

from delayline.sql.deadlines import WATCH, AnswerDeadline, descriptor_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from delayline.sql.server import ServerConnections

#: Seconds at most that the answer to a test of an idle connection may take.
ENGINE_PING_TIMEOUT: Final = 5.0


class EngineLimits:
    """Cuts connections of an Engine whose answers are overdue: for statements, tests and commits.

    Args:
        engine: The Engine, whose own dialect calls the driver.
        connections: delayline's own to that server, which have the limits.
    """

    def __init__(self, engine: Engine, connections: ServerConnections) -> None:
        self._connections = connections
        self._takes_all = engine.dialect.driver != "asyncmy"
        self._watches: dict[int, AnswerDeadline] = {}
        event.listen(engine, "do_connect", self._connecting)
        event.listen(engine, "connect", self._connected, insert=True)
        for name in ("close", "close_detached", "detach"):
            event.listen(engine.pool, name, self._closed)
        own: Any = engine.dialect
        # Instead of events of the Engine, with which SQLAlchemy takes longer for each statement.
        own.do_execute = self._limited_statement(own.do_execute)
        own.do_executemany = self._limited_statement(own.do_executemany)
        own.do_execute_no_params = self._limited_statement(own.do_execute_no_params)
        own.do_commit = self._limited(own.do_commit, connections.server_timeout)
        own.do_rollback = self._limited(own.do_rollback, connections.server_timeout)
        own.do_ping = self._limited(own.do_ping, ENGINE_PING_TIMEOUT)

    def _connecting(self, _: object, record: object, arguments: object, options: dict[str, Any]) -> None:
        """Limit connecting, in which the driver's socket cannot be watched yet."""
        del record, arguments
        limits = dict(options)
        self._connections.limit_connect(limits)
        if not self._takes_all:  # asyncmy has another name for the rest, and hides its socket
            own = {"connect_timeout": limits["connect_timeout"], "read_timeout": self._connections.server_timeout}
            limits = own | options
        for name in ("read_timeout", "write_timeout"):  # for as long as the connection lasts
            if name in limits and name not in options:
                limits[name] = max(limits[name], round(self._connections.server_timeout))
        options |= limits

    def _connected(self, driver: Any, record: Any) -> None:  # noqa: ANN401 - each driver has its own
        if (descriptor := descriptor_of(driver)) is not None:
            self._watches[id(driver)] = record.info[WATCH] = AnswerDeadline(
                descriptor, self._connections.server_timeout, self._connections.stops
            )

    def _closed(self, driver: object, *_: object) -> None:
        if (watch := self._watches.pop(id(driver), None)) is not None:
            watch.close()

    def _limited(self, work: Callable[[Any], Any], seconds: float) -> Callable[[Any], Any]:
        def run(connection: Any) -> Any:  # noqa: ANN401 - the driver's, or the pool's
            watch = self._watches.get(id(getattr(connection, "dbapi_connection", connection)))
            if watch is None:
                return work(connection)
            watch.begin(min(seconds, self._connections.server_timeout))
            try:
                return work(connection)
            finally:
                watch.end()

        return run

    def _limited_statement(self, execute: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:  # noqa: ANN401 - the last of them is SQLAlchemy's context of the statement
            watch = self._watches.get(id(arguments[-1].root_connection.connection.dbapi_connection))
            if watch is None:
                execute(*arguments)
                return
            watch.begin(self._connections.server_timeout)
            try:
                execute(*arguments)
            finally:
                watch.end()

        return run
