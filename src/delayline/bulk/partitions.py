"""Progress of a run that writes to a broker: its rows are partitioned by id, and a confirmed partition is marked.

A repeated run skips marked partitions, and uses the parameters that its first attempt has recorded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, delete, inspect, select
from sqlalchemy.schema import CreateTable

from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import CONTENT, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from delayline.sql.dialect import Dialect

#: The piece that holds the facts.
FACTS: Final = -1
LONGEST_NAME: Final = 64


@dataclass(frozen=True)
class Facts:
    """What must not change between the attempts of a run; times in microseconds since 1970."""

    now: int
    far_from: int
    refused: Mapping[str, str]
    """Why nothing goes to some destinations."""
    refused_ids: Mapping[str, str] = field(default_factory=dict)
    """Why some messages were not taken; known when the run is over."""


@dataclass
class PublishReport:
    """What became of the rows of some pieces."""

    sent: int = 0
    duplicates: int = 0
    rejected: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Why the broker did not take some messages, by id."""

    def add(self, other: PublishReport) -> None:
        """Add what became of others."""
        self.sent += other.sent
        self.duplicates += other.duplicates
        self.rejected += other.rejected
        self.refused |= other.refused


@lru_cache(maxsize=64)
def pieces_table(schema: str | None = None) -> Table:
    """Return the table in that schema, the connection's own where None."""
    return Table(
        "delayline_spark_pieces",
        MetaData(schema=schema),
        Column("name", text(LONGEST_NAME), primary_key=True),
        Column("run", text(MAXIMUM_ID_LENGTH), nullable=False),
        Column("piece", BigInteger, nullable=False),
        Column("content", CONTENT, nullable=False),
    )


class Pieces:
    """The pieces of one run; every call is part of the caller's transaction."""

    def __init__(self, dialect: Dialect, run: str, schema: str | None = None) -> None:
        self._dialect = dialect
        self._run = run
        self.table = pieces_table(schema)

    def create(self, connection: Connection) -> None:
        """Make the table, unless it is there."""
        with self._dialect.setting_up(connection):
            if not inspect(connection).has_table(self.table.name, schema=self.table.schema):
                self._dialect.make(connection, CreateTable(self.table))

    def facts(self, connection: Connection) -> Facts | None:
        """Return the facts that an earlier attempt has settled; None where this is the first."""
        columns = self.table.c
        query = select(columns.content).where(columns.name == self._name(FACTS))
        found = connection.execute(query).scalar()
        return None if found is None else Facts(**json.loads(found))

    def settle(self, connection: Connection, facts: Facts) -> None:
        """Record the job parameters, unless an earlier attempt did."""
        self._insert(connection, FACTS, asdict(facts))

    def mark(self, connection: Connection, piece: int, handed: PublishReport) -> None:
        """Write down that the broker has a piece for good, unless that is known."""
        self._insert(connection, piece, asdict(handed))

    def marked(self, connection: Connection) -> dict[int, PublishReport]:
        """Return what became of the pieces that are marked."""
        columns = self.table.c
        query = select(columns.piece, columns.content).where(columns.run == self._run, columns.piece != FACTS)
        return {piece: PublishReport(**json.loads(content)) for piece, content in connection.execute(query)}

    def forget(self, connection: Connection) -> None:
        """Forget the run, which is over."""
        connection.execute(delete(self.table).where(self.table.c.run == self._run))

    def _insert(self, connection: Connection, piece: int, content: Mapping[str, object]) -> None:
        encoded = json.dumps(content, separators=(",", ":")).encode()
        row = {"name": self._name(piece), "run": self._run, "piece": piece, "content": encoded}
        connection.execute(self._dialect.insert_new(self.table, "name").values(row))

    def _name(self, piece: int) -> str:
        return f"{hashlib.sha256(self._run.encode()).hexdigest()[:48]}-{piece}"
