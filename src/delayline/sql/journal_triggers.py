"""The triggers that write a store's journal, for each product.

A negative number of retries marks the reason of a deletion: see `journal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from delayline.delayed.columns import JOURNALED_NAMES, STORED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class JournalTriggers:
    """Templates of the statements about the triggers that write a store's journal.

    Names in braces are names of tables, quoted, and `store`, a literal.
    """

    create: Mapping[str, str]
    drop: str
    found: str
    """The query for the names of a table's triggers."""


#: What an entry has of a message, of the row before a change and of the one after it.
MESSAGE: Final = ", ".join(JOURNALED_NAMES)
OLD_COLUMNS: Final = ", ".join(f"OLD.{name}" for name in JOURNALED_NAMES)
NEW_COLUMNS: Final = ", ".join(f"NEW.{name}" for name in JOURNALED_NAMES)
ENTRY_COLUMNS: Final = f"(store, event, {MESSAGE}, at, retries)"
GONE: Final = "CASE {retries} WHEN -1 THEN 'cancelled' WHEN -2 THEN 'failed' ELSE 'dispatched' END"
RETRIED: Final = "CASE WHEN {new} > {old} THEN 'retried' ELSE 'rescheduled' END"
CHANGED: Final = RETRIED.format(new="NEW.retry_count", old="OLD.retry_count")
IS_CHANGE: Final = "NEW.retry_count >= 0 AND (NEW.due <> OLD.due OR NEW.retry_count <> OLD.retry_count)"

#: Whole statements at once, as their rows come: a batch costs an insert more. Whose path the caller has set does not
#: matter: the tables are the tables that were there at the beginning.
ON_STATEMENTS: Final = {
    "function": f"""
CREATE OR REPLACE FUNCTION {{function}}() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    INSERT INTO {{journal}} {ENTRY_COLUMNS}
    SELECT TG_ARGV[0], 'scheduled', {MESSAGE}, clock_timestamp(), retry_count FROM stored;
  ELSIF TG_OP = 'DELETE' THEN
    INSERT INTO {{journal}} {ENTRY_COLUMNS}
    SELECT TG_ARGV[0], {GONE.format(retries="retry_count")}, {MESSAGE}, clock_timestamp(), greatest(retry_count, 0)
    FROM gone;
  ELSE
    INSERT INTO {{journal}} {ENTRY_COLUMNS}
    VALUES (TG_ARGV[0], {CHANGED}, {NEW_COLUMNS}, clock_timestamp(), NEW.retry_count);
  END IF;
  RETURN NULL;
END $$
""",  # noqa: S608 - ours
    "stored": """
CREATE TRIGGER {name} AFTER INSERT ON {table} REFERENCING NEW TABLE AS stored
FOR EACH STATEMENT EXECUTE FUNCTION {function}({store})
""",
    "gone": """
CREATE TRIGGER {name} AFTER DELETE ON {table} REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION {function}({store})
""",
    "changed": f"""
CREATE TRIGGER {{name}} AFTER UPDATE OF due, retry_count ON {{table}}
FOR EACH ROW WHEN ({IS_CHANGE}) EXECUTE FUNCTION {{function}}({{store}})
""",
}
ON_ROWS: Final = {
    "stored": """
CREATE TRIGGER {trigger} AFTER INSERT ON {{table}} FOR EACH ROW {begin}
INSERT INTO {{journal}} {columns}
VALUES ({{store}}, 'scheduled', {new}, {now}, NEW.retry_count){end}
""",
    "gone": """
CREATE TRIGGER {trigger} AFTER DELETE ON {{table}} FOR EACH ROW {begin}
INSERT INTO {{journal}} {columns}
VALUES ({{store}}, {gone}, {old}, {now},
CASE WHEN OLD.retry_count < 0 THEN 0 ELSE OLD.retry_count END){end}
""",
    "changed": """
CREATE TRIGGER {trigger} AFTER UPDATE ON {{table}} FOR EACH ROW {begin}
INSERT INTO {{journal}} {columns}
SELECT {{store}}, {changed}, {new}, {now}, NEW.retry_count {nowhere}WHERE {is_change}{end}
""",
}


def _on_rows(**words: str) -> dict[str, str]:
    filled = {
        **words,
        "columns": ENTRY_COLUMNS,
        "old": OLD_COLUMNS,
        "new": NEW_COLUMNS,
        "gone": GONE.format(retries="OLD.retry_count"),
        "changed": CHANGED,
        "is_change": IS_CHANGE,
    }
    return {word: template.format(**filled) for word, template in ON_ROWS.items()}


IN_SCHEMA: Final = """
SELECT TRIGGER_NAME FROM information_schema.TRIGGERS
WHERE EVENT_OBJECT_TABLE = :table AND EVENT_OBJECT_SCHEMA = COALESCE(:schema, DATABASE())
"""
POSTGRESQL: Final = JournalTriggers(
    create=ON_STATEMENTS,
    drop="DROP TRIGGER IF EXISTS {name} ON {table}",
    found="""
SELECT tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE relname = :table AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_table_is_visible(pg_class.oid)
ELSE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = :schema) END
""",
)
MYSQL: Final = JournalTriggers(
    create=_on_rows(trigger="{qualified}", begin="", end="", now="UTC_TIMESTAMP(6)", nowhere="FROM DUAL "),
    drop="DROP TRIGGER IF EXISTS {qualified}",
    found=IN_SCHEMA,
)
#: The published table has columns of other names, some of which .NET may leave empty. A client must not see the entries
#: among its row counts.
PUBLISHED: Final = {column.name: f"[{column.published_name}]" for column in STORED_COLUMNS}
RETRIES: Final = PUBLISHED["retry_count"]
ON_PUBLISHED_ROWS: Final = """
CREATE TRIGGER {{qualified}} ON {{table}} AFTER {when} AS
BEGIN
SET NOCOUNT ON;
INSERT INTO {{journal}} {columns}
SELECT {{store}}, {event}, {message}, SYSUTCDATETIME(), {retries} FROM {rows}
WHERE {where};
END
"""


def _on_published_rows(when: str, event: str, rows: str, *, where: str = "", old: bool = False) -> str:
    of_row = "deleted" if old else "inserted"
    retries, due = f"{of_row}.{RETRIES}", f"{of_row}.{PUBLISHED['due']}"
    message = {name: f"{of_row}.{PUBLISHED[name]}" for name in JOURNALED_NAMES}
    message["destination"] = f"COALESCE({message['destination']}, N'')"
    return ON_PUBLISHED_ROWS.format(
        when=when,
        columns=ENTRY_COLUMNS,
        event=event,
        message=", ".join(message.values()),
        retries=f"CASE WHEN {retries} < 0 THEN 0 ELSE {retries} END",
        rows=rows,
        where=where or f"{due} IS NOT NULL",
    )


SQL_SERVER: Final = JournalTriggers(
    create={
        "stored": _on_published_rows("INSERT", "'scheduled'", "inserted"),
        "gone": _on_published_rows(
            "DELETE",
            GONE.format(retries=f"deleted.{RETRIES}"),
            "deleted",
            old=True,
        ),
        "changed": _on_published_rows(
            "UPDATE",
            RETRIED.format(new=f"inserted.{RETRIES}", old=f"deleted.{RETRIES}"),
            f"inserted JOIN deleted ON inserted.{PUBLISHED['id']} = deleted.{PUBLISHED['id']}",
            where=f"inserted.{RETRIES} >= 0 AND (inserted.{PUBLISHED['due']} <> deleted.{PUBLISHED['due']} "
            f"OR inserted.{RETRIES} <> deleted.{RETRIES} AND inserted.{PUBLISHED['due']} IS NOT NULL)",
        ),
    },
    drop="DROP TRIGGER {qualified}",
    found="""
SELECT t.name FROM sys.triggers AS t JOIN sys.objects AS o ON o.object_id = t.parent_id
WHERE o.name = :table AND SCHEMA_NAME(o.schema_id) = :schema
""",
)
SQLITE: Final = JournalTriggers(
    create=_on_rows(
        trigger="{name}",
        begin="BEGIN",
        end=";\nEND",
        # Its time has milliseconds: rounded up, as nothing may look earlier than it was.
        now="(CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER) + 1) * 1000",
        nowhere="",
    ),
    drop="DROP TRIGGER IF EXISTS {name}",
    found="SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :table AND :schema IS NULL",
)
