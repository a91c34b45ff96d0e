"""The table of what people did to messages: an action a row, with the progress of jobs that change many messages."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, and_, case, insert, inspect, or_, select, update

from delayline.actions import ActionRecord, JobState, OperatorAction, SetRequest
from delayline.errors import BackendUnavailable
from delayline.message import MAXIMUM_DESTINATION_LENGTH, MAXIMUM_ID_LENGTH
from delayline.sql.schema import DUE, JSON_TEXT, MAXIMUM_NAME_LENGTH, TableGroup, register, text
from delayline.sql.setup import RequiredTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Row, Select

    from delayline.actions import SetPreview
    from delayline.sql.database import Database
    from delayline.sql.dialect import Dialect

#: Seconds without a step after which a job's process is thought to have ended.
INTERRUPTED_AFTER: Final = 60
#: Nobody: the job can be taken at once.
NO_OWNER: Final = ""
BEGIN_ATTEMPTS: Final = 5


@lru_cache(maxsize=64)
def actions_table(schema: str | None = None) -> Table:
    """Return the table of actions in that schema, the connection's own where None."""
    return Table(
        "delayline_actions",
        MetaData(schema=schema),
        Column("name", text(MAXIMUM_NAME_LENGTH), primary_key=True),
        Column("endpoint", text(MAXIMUM_DESTINATION_LENGTH), nullable=False),
        Column("action", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("actor", text(MAXIMUM_ID_LENGTH), nullable=False),
        Column("what", JSON_TEXT, nullable=False),
        Column("request", JSON_TEXT),
        Column("rate", BigInteger),
        Column("state", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("result", JSON_TEXT, nullable=False),
        Column("owner", text(MAXIMUM_NAME_LENGTH), nullable=False),
        Column("started", DUE, nullable=False),
        Column("seen", DUE, nullable=False),
        Column("finished", DUE),
        Column("expected", BigInteger),
        Column("done", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("position", BigInteger, nullable=False),
        Column("bound", BigInteger, nullable=False),
        Column("held", JSON_TEXT, nullable=False),
        Column("problems", JSON_TEXT, nullable=False),
    )


ACTIONS: Final = register(TableGroup("actions", lambda _, schema: [actions_table(schema)]))


class SqlActionLog:
    """The actions on the messages of an endpoint.

    Args:
        database: The database, open.
        schema: The schema of its tables.
        endpoint: The endpoint.
    """

    def __init__(self, database: Database, schema: str | None, endpoint: str) -> None:
        self._database = database
        self._schema = schema
        self._endpoint = endpoint
        self._is_set_up = False
        self.is_kept: bool = True
        self._dialect: Dialect = database.dialect
        self._now = database.dialect.values.in_seconds(0)
        self.table: Table = actions_table(schema)
        old = self.table.c.seen < database.dialect.values.in_seconds(-INTERRUPTED_AFTER)
        self._interrupted = old
        self._query: Select[Any] = select(self.table, case((old, 1), else_=0).label("is_old"))

    async def set_up(self) -> None:
        """Create the table if it is missing."""
        if self._is_set_up:
            return
        required = RequiredTables(self._dialect, self._schema, ACTIONS)
        await self._database.set_up(required.plan, required.set_up)
        self._is_set_up = True

    async def record(self, done: ActionRecord) -> None:
        """Keep an action that is over."""
        await self.set_up()
        await self._database.write(partial(self._insert, record=done, owner=NO_OWNER))

    async def actions(self, limit: int) -> Sequence[ActionRecord]:
        """Return the latest actions, the latest first."""
        columns = self.table.c
        query = self._query.where(columns.endpoint == self._endpoint).order_by(columns.started.desc()).limit(limit)
        return await self._database.read(partial(self._rows_if_any, query=query))

    async def action(self, name: str) -> ActionRecord | None:
        """Return the action with that name."""
        query = self._query.where(self.table.c.name == name)
        rows = await self._database.read(partial(self._rows_if_any, query=query))
        return rows[0] if rows else None

    async def stop(self, name: str) -> bool:
        """Stop the job with that name."""
        columns = self.table.c
        running = and_(columns.name == name, columns.state == JobState.RUNNING.value)
        values = {"state": JobState.STOPPED.value, "owner": NO_OWNER, "finished": self._now, "result": "stopped"}
        change = update(self.table).where(running).values(values)
        return await self._database.write(lambda connection: connection.execute(change).rowcount == 1)

    async def begin(
        self, request: SetRequest, preview: SetPreview, *, actor: str, rate: int | None = None
    ) -> ActionRecord:
        """Begin a job, or return the job that does the same already."""
        await self.set_up()
        begin = partial(self._begin, request=request, preview=preview, actor=actor, rate=rate)
        for _ in range(BEGIN_ATTEMPTS):
            try:
                record = await self._database.write(begin)
            except self._dialect.errors.kinds as error:
                if not self._dialect.errors.is_duplicate(error):
                    raise
                record = None
            if record is not None:  # else another process has begun the same at the same moment
                return record
        raise BackendUnavailable(f"the job was begun by others {BEGIN_ATTEMPTS} times at the same moment: try again")

    async def take(self, name: str, owner: str) -> ActionRecord | None:
        """Make `owner` the one that goes on with a job."""
        columns = self.table.c
        free = or_(columns.owner.in_([NO_OWNER, owner]), self._interrupted)
        running = and_(columns.name == name, columns.state == JobState.RUNNING.value, free)
        change = update(self.table).where(running).values(owner=owner, seen=self._now)
        taken = await self._database.write(lambda connection: connection.execute(change).rowcount == 1)
        return await self.action(name) if taken else None

    async def advance(self, record: ActionRecord, owner: str) -> bool:
        """Keep how far a job is; False if it was stopped or taken by another process."""

        def keep(connection: Connection) -> bool:
            if self.locked(connection, record.name, owner) is None:
                return False
            self.keep(connection, record)
            return True

        return await self._database.write(keep)

    async def leave(self, name: str, owner: str) -> None:
        """Let another process go on with the job at once."""
        mine = and_(self.table.c.name == name, self.table.c.owner == owner)
        change = update(self.table).where(mine).values(owner=NO_OWNER)
        await self._database.write(lambda connection: connection.execute(change))

    def locked(self, connection: Connection, name: str, owner: str) -> ActionRecord | None:
        """Return the job while it is the owner's, locked until the transaction ends."""
        columns = self.table.c
        mine = and_(columns.name == name, columns.owner == owner, columns.state == JobState.RUNNING.value)
        change = update(self.table).where(mine).values(seen=self._now)
        if connection.execute(change).rowcount != 1:
            return None
        return self._rows(connection, self._query.where(columns.name == name))[0]

    def keep(self, connection: Connection, record: ActionRecord) -> None:
        """Write how far the job is, in the transaction that has locked it."""
        values: dict[str, Any] = {
            "state": record.state.value,
            "result": json.dumps(record.result),
            "done": record.done,
            "failed": record.failed,
            "position": record.position,
            "held": json.dumps(list(record.held)),
            "problems": json.dumps(list(record.problems)),
        }
        if record.over:
            values |= {"finished": self._now, "owner": NO_OWNER}
        connection.execute(update(self.table).where(self.table.c.name == record.name).values(values))

    def _begin(
        self, connection: Connection, *, request: SetRequest, preview: SetPreview, actor: str, rate: int | None
    ) -> ActionRecord | None:
        encoded = request.encoded()
        digest = hashlib.sha256(f"{self._endpoint}\n{encoded}".encode()).hexdigest()[:8]
        begins = f"{request.job_prefix}{digest}-"
        columns = self.table.c
        same = columns.name.startswith(begins, autoescape=True)
        rows = self._rows(connection, self._query.where(same))
        for record in rows:
            if not record.over:
                return record
        [(now,)] = connection.execute(select(self._now)).all()
        at = self._dialect.values.from_due(now)
        record = ActionRecord.begun(
            f"{begins}{1 + len(rows)}", self._endpoint, request, preview, actor=actor, rate=rate, at=at
        )
        new = self._dialect.words.insert_counted(self.table, "name").values(self._values_of(record, NO_OWNER))
        return record if connection.execute(new).rowcount > 0 else None

    def _insert(self, connection: Connection, record: ActionRecord, owner: str) -> None:
        connection.execute(insert(self.table).values(self._values_of(record, owner)))

    def _values_of(self, record: ActionRecord, owner: str) -> dict[str, Any]:
        kept = self._dialect.values.to_due
        return {
            "name": record.name,
            "endpoint": record.endpoint,
            "action": record.action.value,
            "actor": record.actor[:MAXIMUM_ID_LENGTH],
            "what": json.dumps(record.what),
            "request": None if record.request is None else record.request.encoded(),
            "rate": record.rate,
            "state": record.state.value,
            "result": json.dumps(record.result),
            "owner": owner,
            "started": kept(record.started),
            "seen": kept(record.seen),
            "finished": None if record.finished is None else kept(record.finished),
            "expected": record.expected,
            "done": record.done,
            "failed": record.failed,
            "position": record.position,
            "bound": record.bound,
            "held": json.dumps(list(record.held)),
            "problems": json.dumps(list(record.problems)),
        }

    def _rows_if_any(self, connection: Connection, query: Select[Any]) -> list[ActionRecord]:
        """Return the actions; none where nobody has acted yet, and so no table was made."""
        there = inspect(connection).has_table(self.table.name, schema=self.table.schema)
        return self._rows(connection, query) if there else []

    def _rows(self, connection: Connection, query: Select[Any]) -> list[ActionRecord]:
        return [self._record_of(row) for row in connection.execute(query)]

    def _record_of(self, row: Row[Any]) -> ActionRecord:
        state, instant = JobState(row.state), self._dialect.values.from_due
        if state is JobState.RUNNING and (row.owner == NO_OWNER or row.is_old):
            state = JobState.INTERRUPTED
        return ActionRecord(
            name=row.name,
            endpoint=row.endpoint,
            action=OperatorAction(row.action),
            actor=row.actor,
            what=_text(row.what),
            state=state,
            result=_text(row.result),
            request=None if row.request is None else SetRequest.decoded(row.request),
            rate=None if row.rate is None else int(row.rate),
            started=instant(row.started),
            seen=instant(row.seen),
            finished=None if row.finished is None else instant(row.finished),
            expected=None if row.expected is None else int(row.expected),
            done=int(row.done),
            failed=int(row.failed),
            problems=tuple(json.loads(row.problems)),
            position=int(row.position),
            bound=int(row.bound),
            held=tuple(json.loads(row.held)),
        )


def _text(kept: str) -> str:
    """Return a text that is kept as JSON, which every character set can keep; one of before that as it is."""
    return str(json.loads(kept)) if kept.startswith('"') else kept
