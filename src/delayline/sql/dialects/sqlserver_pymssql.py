"""pymssql, to which bytes are bytes: by itself it sends those that happen to be UTF-8 as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class VarbinaryConnection:
    """A pymssql connection whose cursors bind bytes as varbinary."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - the driver's
        self._connection = connection

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the attribute of the driver's connection."""
        return getattr(self._connection, name)

    def cursor(self) -> VarbinaryCursor:
        """Return a new cursor."""
        return VarbinaryCursor(self._connection.cursor())


class VarbinaryCursor:
    """A cursor of pymssql to which bytes are no text."""

    def __init__(self, cursor: Any) -> None:  # noqa: ANN401 - the driver's
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the attribute of the driver's cursor."""
        return getattr(self._cursor, name)

    def __iter__(self) -> Iterator[Any]:
        """Return the rows."""
        return iter(self._cursor)

    def execute(self, operation: str, parameters: Sequence[Any] = ()) -> Any:  # noqa: ANN401
        """Run the statement once."""
        return self._cursor.execute(operation, literal(parameters))

    def executemany(self, operation: str, seq_of_parameters: Sequence[Sequence[Any]]) -> None:
        """Run the statement for each row."""
        self._cursor.executemany(operation, [literal(row) for row in seq_of_parameters])


def literal(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parameters in the types that pymssql writes as they are meant."""
    return tuple(bytearray(value) if isinstance(value, bytes | memoryview) else value for value in parameters)
