"""The versions of the map of shards, which each shard keeps a copy of: their names and states, and no URL.

A process compares its own map with them when it starts and every few seconds. With an older one it sends nothing any
more, but goes on with what is in the shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, Integer, MetaData, Table, column, func, inspect, select, table

from delayline.clock import SystemClock
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.shards import ShardMapOutdated, ShardState, chosen
from delayline.sql.databases import database_at
from delayline.sql.prepared import Prepared
from delayline.sql.schema import (
    COLD_FILES,
    DUE,
    FILE_HELD,
    JSON_TEXT,
    STORE_SUFFIX,
    TableGroup,
    queue_tables,
    register,
)
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.shards import Shard, ShardMap

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds between looks whether a newer version of the map is in use.
LOOKED_FOR_EVERY: Final = 5.0


@lru_cache(maxsize=64)
def maps_table(schema: str | None = None) -> Table:
    """Return the table of versions in that schema, the connection's own where None."""
    return Table(
        "delayline_shard_maps",
        MetaData(schema=schema),
        Column("version", Integer, primary_key=True, autoincrement=False),
        Column("states", JSON_TEXT, nullable=False),
        Column("noted", DUE, nullable=False),
    )


SHARD_MAPS: Final = register(TableGroup("shards", lambda _, schema: [maps_table(schema)]))


class MapVersions:
    """The versions of the map that are in use, as the shards have them.

    Args:
        shards: The map of this process.
    """

    def __init__(self, shards: ShardMap) -> None:
        self._map = shards
        self._earlier: Sequence[Sequence[str]] = ()
        """The active shards of each version before this one, the newest first."""
        self._outdated: ShardMapOutdated | None = None
        self._looking: asyncio.Task[None] | None = None

    def places_of(self, message_id: str) -> Sequence[str]:
        """Return the shards that a message with that id may wait in as a first send: where it belongs now first."""
        return list(dict.fromkeys(chosen(message_id, among) for among in self.divisions))

    @property
    def divisions(self) -> Sequence[Sequence[str]]:
        """The shards that first sends were divided among by each version, this one's first; of those in use."""
        used = {shard.name for shard in self._map.used}
        earlier = ([name for name in active if name in used] for active in self._earlier)
        return [self._map.active, *(among for among in earlier if among)]

    def check(self) -> None:
        """Raise ShardMapOutdated if a newer version is in use: this process must send nothing by its own."""
        if self._outdated is not None:
            raise self._outdated

    async def publish(self, shard: Shard) -> None:
        """Keep this version in a shard, once. Raises ConfigurationError if it cannot follow those that are there."""
        database, table = database_at(shard.url), maps_table(shard.schema)
        required = RequiredTables(database.dialect, database.dialect.catalog.schema_of(shard.schema), SHARD_MAPS)
        await database.open()
        try:
            await database.set_up(required.plan, required.set_up)
            known = await database.read(partial(_versions, table=table))
            self._compare(known)
            if self._map.version not in known:
                await self._leave_only_empty(known)
                insert = Prepared(
                    database.dialect.words.insert_new(table, "version"), database.dialect.sql, list(table.c.keys())
                )
                noted = database.dialect.values.to_due(SystemClock().now())
                row = self._map.version, json.dumps(self._map.states, sort_keys=True), noted
                await database.write(lambda connection: insert.change(connection, *row))
                self._compare(await database.read(partial(_versions, table=table)))  # others may have been faster
        finally:
            await database.close()

    async def look(self, shards: Collection[Shard]) -> None:
        """Read the versions of the shards that answer. Raises ShardMapOutdated, BackendUnusable or a wrong map."""
        answers = await asyncio.gather(*map(self._read, shards), return_exceptions=True)
        known: dict[int, dict[str, str]] = {}
        for answer in answers:
            if isinstance(answer, dict):
                known |= answer
            elif not isinstance(answer, BackendUnavailable):
                raise answer
        self._compare(known)
        earlier = [known[version] for version in sorted(known, reverse=True) if version < self._map.version]
        self._earlier = [[name for name, state in states.items() if state == ShardState.ACTIVE] for states in earlier]

    async def look_at(self, shard: Shard) -> None:
        """Raise BackendUnusable if a shard, whose database is not open, does not have this version of the map."""
        known = await database_at(shard.url).look(partial(_versions, table=maps_table(shard.schema)))
        if self._map.version not in known:
            raise BackendUnusable(f"{shard} does not have version {self._map.version} of the map of shards")

    def watch(self, shards: Callable[[], Collection[Shard]]) -> None:
        """Look every few seconds, until `stop`, at the shards that are open then."""
        if self._looking is not None:
            return
        self._looking = asyncio.create_task(self._watch(shards), name="delayline map of shards")

    async def stop(self) -> None:
        """Look no more."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    async def _watch(self, shards: Callable[[], Collection[Shard]]) -> None:
        while True:
            await asyncio.sleep(LOOKED_FOR_EVERY)
            try:
                await self.look(shards())
            except ShardMapOutdated as error:
                if self._outdated is None:
                    emit(logger, logging.ERROR, Event.SHARDS_OUTDATED, "%s", error)
                self._outdated = error
            except DelaylineError:
                continue  # of the shard, whose parts report it

    async def _read(self, shard: Shard) -> dict[int, dict[str, str]]:
        database = database_at(shard.url)
        read = partial(_versions, table=maps_table(shard.schema))
        try:
            return await database.read(read)
        except NotStarted:
            return await database.look(read)

    def _compare(self, known: Mapping[int, Mapping[str, str]]) -> None:
        mine, newest = self._map.version, max(known, default=0)
        if newest > mine:
            raise ShardMapOutdated(
                f"this process has version {mine} of the map of shards, and version {newest} is in use: what it sends "
                "could be looked for in vain. Give it the newer map, and restart it"
            )
        if mine in known and dict(known[mine]) != self._map.states:
            raise ConfigurationError(
                f"version {mine} of the map of shards is in use with other shards or states, "
                f"{json.dumps(known[mine])}: give the changed map version {newest + 1}"
            )
        if mine in known or not newest:
            return
        for name, state in known[newest].items():
            now = self._map.states.get(name)
            if now is None:
                raise ConfigurationError(
                    f"shard {name!r} is missing in version {mine} of the map of shards: give it the state draining, "
                    "and once it is empty removed"
                )
            if state == ShardState.REMOVED and now != ShardState.REMOVED:
                raise ConfigurationError(f"shard {name!r} was removed: give the new shard another name")
            if state == ShardState.ACTIVE and now == ShardState.REMOVED:
                raise ConfigurationError(
                    f"shard {name!r} was active in version {newest} of the map of shards: give it the state draining "
                    "first, and removed once it is empty"
                )

    async def _leave_only_empty(self, known: Mapping[int, Mapping[str, str]]) -> None:
        """Raise ConfigurationError if a shard is to be removed that has messages, or does not answer."""
        last = known[max(known)] if known else {}
        for shard in self._map.shards:
            if shard.state is ShardState.REMOVED and last.get(shard.name, ShardState.REMOVED) != ShardState.REMOVED:
                number = await messages_in(shard)
                if number:
                    raise ConfigurationError(
                        f"{shard} still has {number} messages: leave it in the state draining until it has none "
                        "(promote and compact those of a cold tier)"
                    )


async def messages_in(shard: Shard) -> int:
    """Return how many messages a shard has, in queues and waiting, in files of a cold tier also cancelled ones.

    Raises BackendUnavailable.
    """
    database = database_at(shard.url)
    schema = database.dialect.catalog.schema_of(shard.schema)

    def counted(connection: Connection) -> int:
        names = set(inspect(connection).get_table_names(schema=schema))
        queued = queue_tables(schema).queued.name
        counts = [
            select(func.count()).select_from(table(name, schema=schema))
            for name in names
            if name == queued or name.endswith(STORE_SUFFIX)
        ]
        if COLD_FILES in names:
            files = table(COLD_FILES, column("messages"), column("state"), schema=schema)
            counts.append(select(func.coalesce(func.sum(files.c.messages), 0)).where(files.c.state == FILE_HELD))
        return sum(int(connection.execute(count).scalar_one()) for count in counts)

    return await database.look(counted)


def _versions(connection: Connection, table: Table) -> dict[int, dict[str, str]]:
    if not inspect(connection).has_table(table.name, schema=table.schema):
        raise BackendUnusable(
            "this shard has no version of the map of shards: run delayline setup, or start an endpoint that sets up"
        )
    rows = connection.execute(select(table.c.version, table.c.states)).all()
    return {int(version): json.loads(states) for version, states in rows}
