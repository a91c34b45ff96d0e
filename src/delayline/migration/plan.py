"""The plan of a migration and its preview; changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import and_, case, func, null, select

from delayline.bulk.writer import blocking
from delayline.checks import whole_number
from delayline.errors import BackendUnusable, ConfigurationError, DelaylineError
from delayline.message import in_utc
from delayline.migration.collected import CollectedSource, Selection
from delayline.migration.source import LATEST_MOVABLE, NO_ENDPOINT, chosen, skipped_rows
from delayline.migration.tally import Bounds
from delayline.migration.targets import NOOP
from delayline.migration.work import LOOKED, PreviewWork
from delayline.spark.errors import translated_errors
from delayline.spark.session import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession
    from sqlalchemy import ColumnElement, Connection

    from delayline.migration.source import SkippedMessage, SourcePartition, TableSource
    from delayline.migration.target import Target

BATCH_ROWS: Final = 1000
#: The same for a target that commits each batch once: a crash cannot duplicate messages there.
BATCH_ROWS_ONCE: Final = 10_000
#: Rows that go together, about, as a job of Spark's.
ROUND_ROWS: Final = 500_000
ALL_ENDPOINTS: Final = "*"
ANY_SIZE: Final = 1 << 40
TOO_FAR: Final = "it is due later than {} can hold it"
#: Spans of due time that a look is cut into, for each core.
SPANS_A_CORE: Final = 2


@dataclass(frozen=True)
class Plan:
    """The scope of a migration: source, target, endpoints and due times.

    Attributes:
        source: Where the messages are.
        target: Where they go; None for a dry run that only reads.
        endpoints: Endpoint names, or None for all.
        cutoff: Only messages due at this time or later; by default all.
        batch_size: The most rows that are delivered, confirmed and marked together, and may be duplicated after a
            crash; by default 1000, or 10 000 for targets without duplicates.
    """

    source: TableSource
    target: Target | None
    endpoints: Sequence[str] | None = None
    cutoff: datetime | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigurationError for an impossible plan."""
        whole_number("batch_size", self.batch_rows, at_least=1)
        if self.endpoints is not None and not self.endpoints:
            raise ConfigurationError("endpoints=[] would move nothing: name some, or leave it out for all")
        if self.cutoff is not None:
            object.__setattr__(self, "cutoff", in_utc(self.cutoff))

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, at most."""
        if self.batch_size is not None:
            return self.batch_size
        return BATCH_ROWS if self.target is None or not self.target.exactly_once else BATCH_ROWS_ONCE

    @property
    def parameters(self) -> Mapping[str, str]:
        """Everything that a resumed run must have in common with the run that was begun; no secrets."""
        return {
            "from": self.source.kind,
            "source": str(self.source),
            "schema": self.source.schema or "",
            "to": NOOP if self.target is None else self.target.kind,
            "target": NOOP if self.target is None else str(self.target),
            "endpoints": ALL_ENDPOINTS if self.endpoints is None else ", ".join(sorted(self.endpoints)),
            "cutoff": "" if self.cutoff is None else self.cutoff.isoformat(),
            "batch_size": str(self.batch_rows),
        }

    def must_match(self, kept: Mapping[str, str]) -> None:
        """Raise ConfigurationError naming each parameter that the run was begun with otherwise."""
        given = self.parameters
        changed = [name for name in given if given[name] != kept.get(name, "")]
        if changed:
            changes = "; ".join(f"{name} was {kept.get(name, '')!r}, now it is {given[name]!r}" for name in changed)
            raise ConfigurationError(
                f"the migration was begun with other parameters: {changes}. Resume it with the same, or abort it first"
            )


@dataclass
class EndpointPreview:
    """The pending messages of an endpoint, summed up."""

    endpoint: str
    rows: int
    first: datetime | None
    last: datetime | None
    overdue: int
    before_cutoff: int
    destinations: Sequence[tuple[str | None, int]]
    problems: list[str] = field(default_factory=list)
    """Why none of it could move."""
    unmovable: list[tuple[str, int, str | None]] = field(default_factory=list)
    """Why some rows could not, how many, and the id of one."""
    skipped: int = 0
    """Number of further rows without a readable due time, which no run moves."""
    unseen: int = 0
    """Number of rows that were only counted; not included in the other figures."""


def preview(plan: Plan, spark: SparkSession, *, bodies: bool = False) -> list[EndpointPreview]:
    """Return the movable and unmovable messages of each endpoint; changes nothing.

    Args:
        plan: The migration to preview.
        spark: The session.
        bodies: Read bodies as well, as a run does.

    Returns:
        A preview for each endpoint.

    Raises:
        DelaylineError: Source or target cannot be read.
    """
    if isinstance(plan.source, CollectedSource):
        return preview_taken(plan, plan.source, spark, bodies=bodies)
    plan.source.must_exist()
    partitions = partitions_of(plan)
    previews = [_preview(plan, partition, spark, bodies=bodies) for partition in partitions]
    if plan.endpoints is None:
        left = blocking(plan.source.database.look(partial(skipped_rows, source=plan.source, endpoints=None)))
        previews += [_of_no_endpoint(group) for group in left if group.reason == plan.source.ownerless]
    return previews


def preview_taken(plan: Plan, source: CollectedSource, spark: SparkSession, *, bodies: bool) -> list[EndpointPreview]:
    """Return the pending messages of a source that is not a table, as `preview` does."""
    target, now = plan.target, datetime.now(UTC)
    longest = None if target is None else target.longest
    largest = ANY_SIZE if target is None else target.largest_message
    bounds = Bounds(now, None if longest is None else now + longest, largest, bodies)
    tally = source.looked_at(Selection(plan.endpoints, plan.cutoff), bounds, spark)
    previews: list[EndpointPreview] = []
    for endpoint, counts in sorted(tally.endpoints.items()):
        shown = EndpointPreview(
            endpoint, counts.rows + counts.unseen, counts.first, counts.last, counts.overdue, counts.before_cutoff,
            counts.destinations.most_common(), unseen=counts.unseen,
        )  # fmt: skip
        if target is not None:
            _ask_the_target(target, shown, lambda _: None)
        if counts.too_far:
            shown.unmovable.append((TOO_FAR.format(target), counts.too_far, None))
        shown.unmovable += [(why, number, counts.examples[why]) for why, number in counts.reasons.most_common()]
        previews.append(shown)
    return previews


def partitions_of(plan: Plan, *, each: bool = True) -> list[SourcePartition]:
    """Return the selected messages, by partition.

    Args:
        plan: the migration to look at.
        each: whether an endpoint without messages is an error.

    Raises:
        BackendUnusable: A table has an unknown shape.
        ConfigurationError: With `each`, for an endpoint without messages.
    """
    source = plan.source

    def look(connection: Connection) -> list[SourcePartition]:
        partitions = chosen(source, source.partitions(connection), plan.endpoints, each=each)
        for partition in partitions:
            source.check_columns(connection, partition.table)
        return partitions

    return blocking(source.database.look(look))


def waits(plan: Plan, partition: SourcePartition) -> bool:
    """Return whether the partition has a row to move."""
    some = select(plan.source.table(partition.table).c[plan.source.key]).where(
        plan.source.movable(partition, plan.cutoff)
    )
    return bool(blocking(plan.source.database.look(lambda connection: connection.execute(some.limit(1)).first())))


def looked_through(
    plan: Plan,
    partition: SourcePartition,
    spark: SparkSession,
    *,
    bodies: bool,
    first: datetime | None,
    last: datetime | None,
) -> tuple[int, list[tuple[str, int, str | None]]]:
    """Read all rows of the partition; return how many are valid, and reason, number and an id of the others."""
    number = max(1, SPANS_A_CORE * parallelism(spark)) if first != last else 1
    cuts = [] if first is None or last is None else [first + (last - first) / number * cut for cut in range(1, number)]
    largest = ANY_SIZE if plan.target is None else plan.target.largest_message
    look = PreviewWork(plan.source, partition, plan.cutoff, cuts, bodies, largest)
    with translated_errors():
        spans = spark.range(0, len(cuts) + 1, 1, len(cuts) + 1)
        looked = spans.mapInArrow(look.through, LOOKED).toArrow().to_pylist()
    counts: Counter[str | None] = Counter()
    examples: dict[str | None, str | None] = {}
    for row in looked:
        counts[row["reason"]] += row["rows"]
        examples.setdefault(row["reason"], row["id"])
    sound = counts.pop(None, 0)
    return sound, [(reason or "", rows, examples[reason]) for reason, rows in counts.most_common()]


def _of_no_endpoint(left: SkippedMessage) -> EndpointPreview:
    unmovable: list[tuple[str, int, str | None]] = [(left.reason, left.rows, next(iter(left.names), None))]
    return EndpointPreview(NO_ENDPOINT, 0, None, None, 0, 0, [], unmovable=unmovable, skipped=left.rows)


def _preview(plan: Plan, partition: SourcePartition, spark: SparkSession, *, bodies: bool) -> EndpointPreview:
    counted = blocking(plan.source.database.look(lambda connection: _counted(connection, plan, partition)))
    shown, too_far = counted
    table, name = plan.source.table(partition.table), partial(_name_of_one, plan, partition)
    if shown.skipped:
        shown.unmovable.append((plan.source.outside, shown.skipped, name(plan.source.unmovable(partition))))
    if plan.target is not None:
        _ask_the_target(plan.target, shown, lambda queue: name(table.c[plan.source.destination or ""] == queue))
        if too_far:
            latest = table.c[plan.source.due] > plan.source.kept_due(_latest(plan, datetime.now(UTC)))
            shown.unmovable.append((TOO_FAR.format(plan.target), too_far, name(latest)))
    if shown.rows:
        _, reasons = looked_through(plan, partition, spark, bodies=bodies, first=shown.first, last=shown.last)
        shown.unmovable += reasons
    return shown


def _latest(plan: Plan, now: datetime) -> datetime:
    """Return the last due time that the target accepts."""
    longest = None if plan.target is None else plan.target.longest
    return LATEST_MOVABLE if longest is None or longest > LATEST_MOVABLE - now else now + longest


def _name_of_one(plan: Plan, partition: SourcePartition, condition: ColumnElement[bool]) -> str | None:
    """Return the name of a row of the partition for which the condition is true; None for none."""
    source = plan.source
    table = source.table(partition.table)
    query = select(source.name_column(table)).where(source.owned(partition), condition).limit(1)
    named = blocking(source.database.look(lambda connection: connection.execute(query).first()))
    return None if named is None else source.shown_name(named[0])


def _counted(connection: Connection, plan: Plan, partition: SourcePartition) -> tuple[EndpointPreview, int]:
    """Return the counts of a partition, and the number of rows that the target cannot hold so long."""
    source, now = plan.source, datetime.now(UTC)
    table = source.table(partition.table)
    due, movable = table.c[source.due], source.movable(partition, plan.cutoff)
    latest = _latest(plan, now)
    group = null() if source.destination is None else table.c[source.destination]
    query = select(
        group, func.count(), _number(source.movable(partition, None)), _number(movable),
        _number(and_(movable, due < source.kept_due(now))), _number(and_(movable, due > source.kept_due(latest))),
        func.min(case((movable, due))), func.max(case((movable, due))),
    )  # fmt: skip
    grouped = [] if source.destination is None else [group]
    source.dialect.bulk.begin_scan(connection)
    source.dialect.bulk.plan_for_scans(connection)
    groups = connection.execute(query.select_from(table).where(source.owned(partition)).group_by(*grouped)).fetchall()
    mine, everything, rows, overdue, too_far = (sum(int(row[column]) for row in groups) for column in range(1, 6))
    first, last = ([source.read_due(row[column]) for row in groups if row[column] is not None] for column in (6, 7))
    destinations = sorted(((row[0], int(row[3])) for row in groups if row[3] and grouped), key=lambda pair: -pair[1])
    shown = EndpointPreview(
        partition.endpoint,
        rows,
        min(first, default=None),
        max(last, default=None),
        overdue,
        everything - rows,
        destinations,
        skipped=mine - everything,
    )
    return shown, too_far


def _number(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count(case((condition, 1)))


def _ask_the_target(target: Target, shown: EndpointPreview, name: Callable[[str], str | None]) -> None:
    """Add the rows that the target refuses; name: returns the message id for a destination."""
    try:
        target.endpoint_named(shown.endpoint)
    except (BackendUnusable, ConfigurationError) as error:
        shown.problems.append(str(error))
        return
    known = {destination: number for destination, number in shown.destinations if destination}
    try:
        refused = target.refusals(list(known))
    except DelaylineError as error:
        shown.problems.append(str(error))
        return
    shown.unmovable += [(reason, known[destination], name(destination)) for destination, reason in refused.items()]
