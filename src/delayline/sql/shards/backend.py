"""The back end of several shards: `shards://shards.toml` names the file that has their map."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from delayline.backends import Backend, BackendOptions, BulkRoute, backend_of, find_backend
from delayline.errors import BackendUnavailable, ConfigurationError, DelaylineError
from delayline.shards import ShardMap
from delayline.sql import databases
from delayline.sql.shards.store import ShardedDelayedMessageStore
from delayline.sql.shards.transport import ShardedTransport
from delayline.sql.shards.versions import SHARD_MAPS, MapVersions, messages_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.backends import BackendUse, Findings
    from delayline.shards import Shard


class ShardsBackend(Backend):
    """Tables of several SQL databases, or of several schemas; the map says which, and has their URLs."""

    bulk_route = BulkRoute.MESSAGES

    def transport(self, url: str, options: BackendOptions) -> ShardedTransport:
        """Return a new transport on the shards' queue tables."""
        return ShardedTransport(map_at(url, options), fair_by=options.queues_fair_by)

    def store(self, url: str, options: BackendOptions) -> ShardedDelayedMessageStore:
        """Return a new store on a table in each shard."""
        return ShardedDelayedMessageStore(map_at(url, options), table_name=options.table_name, journal=options.journal)

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return findings about each shard, and about the version of the map."""
        if not use.delays:
            return ()
        shards = map_at(url, options)
        findings = [finding for of_shard in await asyncio.gather(*map(_examined, shards.used)) for finding in of_shard]
        versions = MapVersions(shards)
        try:
            await versions.look(shards.used)
        except DelaylineError as error:
            findings.append(("map of shards", False, str(error)))
        else:
            states = ", ".join(f"{name} {state}" for name, state in shards.states.items())
            findings.append(("map of shards", True, f"version {shards.version}: {states}"))
        findings += [
            ("limits of queues", True, f"hold in each of the {len(shards.used)} shards for itself"),
            ("order of messages", True, "is kept in each shard for itself"),
        ]
        return findings

    async def endpoints(self, url: str, options: BackendOptions) -> Sequence[str]:
        """Return the endpoints whose tables of delayed messages are in any shard."""
        shards = map_at(url, options).used
        names = await asyncio.gather(*(databases.endpoints(shard.url, schema=shard.schema) for shard in shards))
        return sorted({name for of_shard in names for name in of_shard})

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Sequence[str]:
        """Return the SQL that would run, of one shard after the other."""
        statements: list[str] = []
        for shard in map_at(url, options).used:
            own = replace(options, schema=shard.schema)
            planned = [
                *await databases.planned(shard.url, [SHARD_MAPS], schema=shard.schema),
                *await backend_of(shard.url).planned_setup(shard.url, own, use),
            ]
            statements += [f"-- {shard}", *dict.fromkeys(planned)] if planned else []
        return statements

    async def after_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return whether each shard has the map."""
        shards = map_at(url, options)
        findings: list[tuple[str, bool | None, str]] = []
        for shard in shards.used:
            try:
                await MapVersions(shards).look_at(shard)
            except DelaylineError as error:
                findings.append((str(shard), False, f"{error}. Run delayline setup again when it answers"))
        return findings


def map_at(url: str, options: BackendOptions) -> ShardMap:
    """Return the map in the file that the URL names. Raises ConfigurationError."""
    if options.schema is not None:
        raise ConfigurationError(
            f"schema = {options.schema!r} is for a single database: give each shard of the map its own schema"
        )
    path = url.partition(":")[2]
    return ShardMap.from_file(path.removeprefix("//") if path.startswith("//") else path)


def map_named(url: str, *, schema: str | None = None) -> ShardMap | None:
    """Return the map of shards that a URL names; None for the URL of something else.

    Args:
        url: Of any back end.
        schema: What a setting says, which shards have for themselves.

    Raises:
        ConfigurationError: The map cannot be read, or there is a schema beside it.
    """
    found = isinstance(find_backend(url), ShardsBackend)
    return map_at(url, BackendOptions(schema=schema)) if found else None


async def _examined(shard: Shard) -> Findings:
    """Return the findings about a shard, each with its name."""
    try:
        findings = await databases.examine(shard.url, schema=shard.schema)
        number = await messages_in(shard)
    except BackendUnavailable as error:
        return [(str(shard), False, f"is out of reach, its messages wait: {error}")]
    except DelaylineError as error:
        return [(str(shard), False, str(error))]
    found = [(f"{subject} of shard {shard.name}", right, text) for subject, right, text in findings]
    return [*found, (str(shard), True, f"{shard.state}, {number} messages in queues and waiting")]
