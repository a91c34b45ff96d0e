"""Timeout tables as .NET creates and fills them."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import select, text

from delayline.bulk.writer import blocking
from delayline.message import TimeoutHeaders, to_wire_time
from delayline.migration import source_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

    from delayline.migration.source import TableSource

#: The statements of the installers of NServiceBus' SQL persistence.
POSTGRESQL: Final = """
create table public."{name}_TimeoutData"(
    "Id" uuid not null, "Destination" character varying(200), "SagaId" uuid, "State" bytea,
    "Time" timestamp, "Headers" text, "PersistenceVersion" character varying(23), primary key ("Id"));
create index "{name}_TimeoutData_TimeIdx" on public."{name}_TimeoutData" ("Time" asc);
create index "{name}_TimeoutData_SagaIdx" on public."{name}_TimeoutData" ("SagaId" asc);
"""
MARIADB: Final = """
create table `{name}_TimeoutData` (
    `Id` varchar(38) not null, `Destination` nvarchar(200), `SagaId` varchar(38), `State` longblob,
    `Time` datetime, `Headers` json not null, `PersistenceVersion` varchar(23) not null,
    primary key (`Id`)) default charset=ascii;
create index `Index_SagaId` on `{name}_TimeoutData` (`SagaId`);
create index `Index_Time` on `{name}_TimeoutData` (`Time`)
"""
LATER: Final = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
NO_SAGA: Final = uuid.UUID(int=0)
HEADERS: Final = {"NServiceBus.EnclosedMessageTypes": "Sales.Remind, Sales", "Ключ 🔑": "Größe"}


@dataclass(frozen=True)
class Timeout:
    """A row, as .NET writes it."""

    number: int
    destination: str | None = "billing"
    time: datetime | None = LATER
    headers: str | None = ""
    state: bytes | None = b"{}"
    saga: uuid.UUID | None = NO_SAGA
    version: str | None = "6.0.0.0"

    @property
    def id(self) -> str:
        return str(uuid.UUID(int=self.number))

    @property
    def text(self) -> str | None:
        """The headers: indented JSON, unless the test says something else."""
        if self.headers != "":
            return self.headers
        named = {"NServiceBus.MessageId": f"message-{self.number}", **HEADERS}
        if self.time is not None:
            named[TimeoutHeaders.EXPIRE] = to_wire_time(self.time)
        return json.dumps(named, indent=2, ensure_ascii=False)

    @property
    def row(self) -> dict[str, Any]:
        """The values, whatever the product calls their types."""
        time = None if self.time is None else self.time.replace(tzinfo=None)
        return {
            "Id": self.id, "Destination": self.destination, "SagaId": None if self.saga is None else str(self.saga),
            "State": self.state, "Time": time, "Headers": self.text, "PersistenceVersion": self.version,
        }  # fmt: skip


class Legacy:
    """The timeout tables of one database."""

    def __init__(self, url: str, *endpoints: str) -> None:
        self.url = url
        self.source: TableSource = source_at("nservicebus-sql", url)
        words = POSTGRESQL if url.startswith("postgresql") else MARIADB
        for endpoint in endpoints:
            for statement in filter(str.strip, words.format(name=endpoint.replace(".", "_")).split(";")):
                self.change(lambda connection, sql=statement: connection.execute(text(sql)))  # type: ignore[misc]

    def add(self, endpoint: str, *timeouts: Timeout) -> None:
        """Store timeouts."""
        table = self.source.table(self.table(endpoint))
        quote = self.source.dialect.sql.identifier_preparer.quote
        names = list(Timeout(0).row)
        uuids = self.url.startswith("postgresql")
        values = ", ".join(f"CAST(:{one} AS uuid)" if uuids and one in ("Id", "SagaId") else f":{one}" for one in names)
        sql = text(f"INSERT INTO {quote(table.name)} ({', '.join(map(quote, names))}) VALUES ({values})")  # noqa: S608 - ours
        self.change(lambda connection: connection.execute(sql, [one.row for one in timeouts]))

    def rows(self, endpoint: str) -> list[tuple[Any, ...]]:
        """Return the rows of the table, in the order of the ids."""
        table = self.source.table(self.table(endpoint))
        found = self.look(lambda connection: connection.execute(select(table).order_by(table.c.Id)).fetchall())
        return [tuple(row) for row in found]

    def ids(self, endpoint: str) -> list[str]:
        """Return the ids in the table."""
        return sorted(str(row[0]) for row in self.rows(endpoint))

    def table(self, endpoint: str) -> str:
        return f"{endpoint.replace('.', '_')}_TimeoutData"

    def look(self, work: Callable[[Connection], Any]) -> Any:  # noqa: ANN401 - what it returns
        return blocking(self.source.database.look(work))

    def change(self, work: Callable[[Connection], Any]) -> None:
        async def opened() -> None:
            await self.source.database.open()
            try:
                await self.source.database.write(work)
            finally:
                await self.source.database.close()

        asyncio.run(opened())

    def everything(self) -> list[str]:
        """Return the names of all tables: a look may not add any."""
        return self.look(self.source.table_names)  # type: ignore[no-any-return]


def fill(url: str, endpoint: str, number: int, *, due: str = "now() at time zone 'utc' + interval '1 day'") -> None:
    """Store many timeouts in PostgreSQL, a second apart, with headers and bodies as a saga's have."""
    table = f"{endpoint.replace('.', '_')}_TimeoutData"
    headers = json.dumps({"NServiceBus.MessageId": "MESSAGE", **{f"Header.{n}": "x" * 20 for n in range(6)}}, indent=2)
    statement = f"""
        INSERT INTO public."{table}"
        SELECT gen_random_uuid(), 'billing', '{NO_SAGA}', convert_to(repeat('b', 200), 'UTF8'),
        {due} + make_interval(secs => n), replace('{headers}', 'MESSAGE', 'm' || n), '6.0.0.0'
        FROM generate_series(1, {number}) AS n
    """  # noqa: S608 - ours
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def some(number: int, *, first: int = 1, apart: timedelta = timedelta(seconds=1)) -> Sequence[Timeout]:
    """Return timeouts with numbers as ids, one after the other."""
    return [replace(Timeout(n), time=LATER + apart * n) for n in range(first, first + number)]
