"""Jobs over a map of shards: each is the same job in the store of every shard.

The rows of a job are divided as first sends are, by the shards that were active when it began: its ledger in each shard
keeps them, so that a job that goes on with a newer map divides its rows as before.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pyspark import inheritable_thread_target
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from delayline.bulk.cold_folder import ColdFolder
from delayline.bulk.jobs import JobName
from delayline.bulk.writer import blocking
from delayline.clock import from_microseconds
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.shards import ShardMap, ShardMapOutdated, chosen, named_errors
from delayline.spark.errors import translated_errors
from delayline.spark.options import StoreOptions
from delayline.spark.placement import PlacementJob
from delayline.spark.session import session_for
from delayline.spark.sources import SHARD_OF_ROW, with_shard
from delayline.sql.shards.backend import map_named
from delayline.sql.shards.versions import MapVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from delayline.delayed.store import OnConflict
    from delayline.shards import Shard
    from delayline.spark.placement import Placed, Placement
    from delayline.spark.schedule import JobTarget
    from delayline.spark.sources import Columns

Result = TypeVar("Result")


@dataclass(frozen=True)
class TargetPart:
    """A store that a job reads or writes: the target's own, or that of one of its shards."""

    target: JobTarget
    shard: Shard | None = None


def parts_of(target: JobTarget) -> Sequence[TargetPart]:
    """Return the store of each shard that may have messages; of a single store, itself.

    Their cold tiers are in one folder, and each has its own catalog. Raises ConfigurationError for a map that cannot be
    read.
    """
    shards = map_named(target.store_url, schema=target.schema)
    if shards is None:
        return [TargetPart(target)]
    return [TargetPart(replace(target, store_url=shard.url, schema=shard.schema), shard) for shard in shards.used]


def in_each_shard(
    parts: Mapping[str, TargetPart], work: Callable[[TargetPart], Result], spark: SparkSession
) -> Mapping[str, Result]:
    """Run the work on the parts, side by side, and return the results by shard. Blocks.

    Raises the error of a shard once the work on the others is over; of several that of the first that does answer.
    """

    def run(part: TargetPart) -> Result:
        with named_errors(part.shard), translated_errors():
            return work(part)

    in_thread = inheritable_thread_target(spark)(run)
    with ThreadPoolExecutor(len(parts), "delayline shard") as threads:
        working = {name: threads.submit(in_thread, part) for name, part in parts.items()}
    errors = [error for future in working.values() if (error := future.exception()) is not None]
    if errors:
        error = min(errors, key=lambda error: isinstance(error, BackendUnavailable))
        if isinstance(error, BackendUnavailable):
            done = ", ".join(name for name, future in working.items() if future.exception() is None)
            error.args = (f"{error}. The work on {done or 'no other shard'} is done",)
        raise error
    return {name: future.result() for name, future in working.items()}


def over_shards(
    target: JobTarget, work: Callable[[JobTarget, SparkSession | None], Result], spark: SparkSession | None
) -> Sequence[Result]:
    """Run the work on the target, or on that of each of its shards as `in_each_shard`. Blocks."""
    parts = {part.shard.name: part for part in parts_of(target) if part.shard is not None}
    if not parts:
        return [work(target, spark)]
    session = session_for(spark)
    return list(in_each_shard(parts, lambda part: work(part.target, session), session).values())


@dataclass(frozen=True)
class ShardSearch:
    """What a task that stores rows in a shard asks of the others; pickled."""

    shard: str
    shards: ShardMap
    divisions: Sequence[Sequence[str]]
    """The shards that first sends are or were divided among, by each version of the map."""
    stores: Mapping[str, StoreOptions]
    cold_tier: str | None
    """The folder of the shards' cold tiers."""

    def check(self) -> None:
        """Raise BackendUnusable if a newer version of the map is in use than the job has."""
        shards = with_addresses(self.shards, self.stores)
        try:
            blocking(MapVersions(shards).look([shard for shard in shards.used if shard.name == self.shard]))
        except ShardMapOutdated as error:
            raise BackendUnusable(str(error)) from error

    def waiting(self, ids: pa.Array, on_conflict: OnConflict) -> NDArray[Any]:
        """Return which of the ids wait in another shard, where they belong by another version of the map.

        Raises ConfigurationError if these were to be replaced, which a transaction of this shard cannot.
        """
        known: NDArray[Any] = np.zeros(len(ids), dtype=bool)
        places: dict[str, list[int]] = defaultdict(list)
        if len(self.divisions) > 1:
            for position, key in enumerate(ids.to_pylist()):
                for name in {chosen(key, among) for among in self.divisions} - {self.shard}:
                    places[name].append(position)
        folder = None if self.cold_tier is None else ColdFolder(self.cold_tier)
        for name, positions in places.items():
            known[positions] |= self.stores[name].pieces(folder).waiting(ids.take(positions))
        if on_conflict == "replace" and known.any():
            raise ConfigurationError(
                f"message {ids[int(np.argmax(known))].as_py()!r} waits in another shard than {self.shard!r}, where it "
                "belonged by an earlier version of the map, and cannot be replaced there: cancel it, or use 'keep'"
            )
        return known


@dataclass(frozen=True)
class JobOfShard:
    """What a shard's part of a job knows of the whole job."""

    among: Sequence[str]
    """The shards that the rows are divided among."""
    is_named: bool
    now: datetime
    """When delays begin, the same in all shards."""
    search: ShardSearch


def with_addresses(shards: ShardMap, stores: Mapping[str, StoreOptions]) -> ShardMap:
    """Return the map with the URLs that connections of a job need, with the password of this machine."""
    addressed = (
        replace(shard, url=stores[shard.name].address) if shard.name in stores else shard for shard in shards.shards
    )
    return ShardMap(shards.version, tuple(addressed))


def of_shard(rows: DataFrame, columns: Columns, among: Sequence[str], name: str) -> DataFrame:
    """Return the rows that belong to a shard."""
    divided = rows if SHARD_OF_ROW in rows.columns else with_shard(rows, columns, among)
    return divided.where(F.col(SHARD_OF_ROW) == name)


class ShardedPlacement:
    """The job of each shard, begun in all of them: in every used shard it is known what has begun there.

    Args:
        placement: Where the rows go.
        run: The name and version of the job, if it has a name.
        batch: The number of a stream's batch.

    Raises:
        ConfigurationError: The job cannot be had over shards, or has begun in another way.
        ShardMapOutdated: A newer version of the map is in use.
        BackendUnavailable: A shard does not answer; nothing was stored.
    """

    def __init__(self, placement: Placement, run: JobName | None, batch: int | None = None) -> None:
        self._placement = placement
        self._check()
        self._parts = {part.shard.name: part for part in parts_of(placement.target) if part.shard is not None}
        self._stores = {name: StoreOptions.of(part.target.options) for name, part in self._parts.items()}
        shards = map_named(placement.target.store_url)
        assert shards is not None  # noqa: S101 - it has parts
        self._run = run or JobName(uuid.uuid4().hex)
        addressed = with_addresses(shards, self._stores)
        versions = MapVersions(addressed)
        blocking(versions.look(addressed.used))
        entry = self._run if batch is None else JobName(str(self._run), batch)
        begun, now = self._begun(entry, stream=batch is not None)
        self.among: Sequence[str] = begun or shards.active
        """The shards that the rows are divided among."""
        divisions = list(dict.fromkeys(tuple(names) for names in (self.among, *versions.divisions)))
        self._jobs: dict[str, PlacementJob] = {}
        for name in self.among:
            search = ShardSearch(name, shards, divisions, self._stores, placement.target.cold_tier)
            shard = JobOfShard(self.among, run is not None, now, search)
            settings = replace(placement, target=self._parts[name].target)
            with named_errors(self._parts[name].shard):
                job = PlacementJob(settings, self._run, batch, shard)
                self._must_agree(job.begin().parameters.shards)
            self._jobs[name] = job

    def place(self, rows: DataFrame) -> Mapping[str, Placed]:
        """Place the rows of all shards side by side; return the numbers by shard. Blocks.

        Raises:
            BackendUnavailable: A shard does not answer; what belongs to others is stored.
            DelaylineError: Another error, of the shard that it names.
        """
        divided = with_shard(rows, self._placement.columns, self.among).persist()  # it is read for each of them

        def place_in(part: TargetPart) -> Placed:
            assert part.shard is not None  # noqa: S101 - one of the map
            name = part.shard.name
            return self._jobs[name].place_pieces(of_shard(divided, self._placement.columns, (), name), None)

        try:
            return in_each_shard({name: self._parts[name] for name in self._jobs}, place_in, rows.sparkSession)
        except BackendUnavailable as error:
            error.args = (f"{error}: run the job {str(self._run)!r} again once the shard answers",)
            raise
        finally:
            divided.unpersist()

    def _check(self) -> None:
        placement, target = self._placement, self._placement.target
        for part in parts_of(target):
            replace(placement, target=part.target).check()
        if placement.on_conflict == "raise" or placement.atomic == "job":
            raise ConfigurationError(
                "a job over shards cannot be all or nothing, as on_conflict='raise' and atomic='job' want: a "
                "transaction is in one shard. Use 'keep' and 'piece', or schedule into the URL of a shard"
            )
        for name, given in (("delay_levels", target.delay_levels), ("job_folder", target.job_folder)):
            if given is not None:
                raise ConfigurationError(f"{name} is for a single store, not for a map of shards: leave it out")

    def _begun(self, name: JobName, *, stream: bool) -> tuple[Sequence[str], datetime]:
        """Return the shards that a begun job has divided its rows among, if it has begun, and when its delays begin."""
        divided: Sequence[str] = ()
        times: list[datetime] = []
        begins: datetime | None = None
        for shard, part in self._parts.items():
            store = self._stores[shard]
            with named_errors(part.shard):
                job = store.pieces().begun(name, stream=stream)
                times.append(store.staging().now())
            if job is not None:
                divided, begins = job.parameters.shards, from_microseconds(job.parameters.now)
        gone = [shard for shard in divided if shard not in self._parts]
        if gone:
            raise ConfigurationError(
                f"the job {str(name)!r} has begun with shard {gone[0]!r}, which has been removed since then: give the "
                "rows that are missing a job of another name"
            )
        return divided, begins or max(times)

    def _must_agree(self, shards: Sequence[str]) -> None:
        if [*shards] != [*self.among]:
            raise ConfigurationError(
                f"the job {str(self._run)!r} has begun with the shards {', '.join(shards)}, and not with "
                f"{', '.join(self.among)}: run it again with the map that it began with, or give it another name"
            )
