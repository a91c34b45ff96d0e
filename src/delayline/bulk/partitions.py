"""The ledger of jobs that publish to a broker: the partitions of their rows that the broker has confirmed.

A job that is run again skips the recorded partitions, and uses the parameters that its first attempt has saved.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, delete, select

from delayline.message import MAXIMUM_ID_LENGTH
from delayline.sql.schema import CONTENT, TableGroup, register, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from delayline.sql.dialect import Dialect

#: The number of the entry that holds the parameters.
PARAMETERS: Final = -1
LONGEST_JOB_NAME: Final = 64


@dataclass(frozen=True)
class JobParameters:
    """The parameters that all attempts of a job share; times in microseconds since 1970."""

    now: int
    far_from: int
    """Messages due earlier are near."""
    refused: Mapping[str, str]
    """Destinations that the broker cannot reach, with the reason."""
    refused_ids: Mapping[str, str] = field(default_factory=dict)
    """Ids of messages that the broker has refused, with the reason; saved when the job commits."""
    fingerprint: str | None = None
    """Of the input; None where it was not taken."""


@dataclass
class PublishReport:
    """The counts of some partitions."""

    sent: int = 0
    duplicates: int = 0
    rejected: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Ids of messages that the broker has refused, with the reason."""

    def add(self, other: PublishReport) -> None:
        """Add the counts of other partitions."""
        self.sent += other.sent
        self.duplicates += other.duplicates
        self.rejected += other.rejected
        self.refused |= other.refused


@lru_cache(maxsize=64)
def partitions_table(schema: str | None = None) -> Table:
    """Return the table in that schema; in the connection's default schema for None."""
    return Table(
        "delayline_spark_pieces",
        MetaData(schema=schema),
        Column("name", text(LONGEST_JOB_NAME), primary_key=True),
        Column("run", text(MAXIMUM_ID_LENGTH), nullable=False),
        Column("piece", BigInteger, nullable=False),
        Column("content", CONTENT, nullable=False),
    )


PARTITIONS: Final = register(TableGroup("broker_jobs", lambda _, schema: [partitions_table(schema)]))


class PublishedPartitions:
    """The entries of a job. Every call runs in the caller's transaction."""

    def __init__(self, dialect: Dialect, run: str, schema: str | None = None) -> None:
        self._dialect = dialect
        self._run = run
        self.table: Table = partitions_table(schema)

    def create(self, connection: Connection) -> None:
        """Create the table, or upgrade it."""
        RequiredTables(self._dialect, self.table.schema, PARTITIONS).set_up(connection)

    def parameters(self, connection: Connection) -> JobParameters | None:
        """Return the parameters that an earlier attempt has saved; None for the first attempt."""
        columns = self.table.c
        query = select(columns.content).where(columns.name == self._name(PARAMETERS))
        content = connection.execute(query).scalar()
        return None if content is None else JobParameters(**json.loads(content))

    def save_parameters(self, connection: Connection, parameters: JobParameters) -> None:
        """Save the parameters if no earlier attempt did."""
        self._insert(connection, PARAMETERS, asdict(parameters))

    def add(self, connection: Connection, partition: int, report: PublishReport) -> None:
        """Record that the broker has confirmed a partition. Idempotent."""
        self._insert(connection, partition, asdict(report))

    def reports(self, connection: Connection) -> dict[int, PublishReport]:
        """Return the reports of the recorded partitions, by number."""
        columns = self.table.c
        query = select(columns.piece, columns.content).where(columns.run == self._run, columns.piece != PARAMETERS)
        return {number: PublishReport(**json.loads(content)) for number, content in connection.execute(query)}

    def delete(self, connection: Connection) -> None:
        """Delete all entries of the job."""
        connection.execute(delete(self.table).where(self.table.c.run == self._run))

    def _insert(self, connection: Connection, number: int, content: Mapping[str, object]) -> None:
        encoded = json.dumps(content, separators=(",", ":")).encode()
        row = {"name": self._name(number), "run": self._run, "piece": number, "content": encoded}
        connection.execute(self._dialect.words.insert_new(self.table, "name").values(row))

    def _name(self, number: int) -> str:
        return f"{hashlib.sha256(self._run.encode()).hexdigest()[:48]}-{number}"
