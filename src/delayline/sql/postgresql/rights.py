"""Missing rights of a PostgreSQL user: a refusal names the table or schema, but not the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from delayline.sql.server import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Table


DENIED: Final = "42501"
RIGHTS_REMEDY: Final = (
    "As its owner, GRANT this user the missing rights: delayline needs USAGE on the schema, CREATE on it for "
    "`delayline setup`, and SELECT, INSERT, UPDATE and DELETE on the tables"
)
#: Whatever has a name that is in the refusal, which may be in any language.
LACKING: Final = """
SELECT kind, format(CASE kind WHEN 'SCHEMA' THEN '%%2$I' ELSE '%%1$I.%%2$I' END, place, name), name::text,
  CASE WHEN NOT pg_has_role(owner, 'USAGE') THEN pg_get_userbyid(owner) END, quote_ident(current_user),
  ARRAY(SELECT need FROM unnest(needs) AS need WHERE NOT CASE kind
    WHEN 'TABLE' THEN has_table_privilege(one, need)
    WHEN 'SEQUENCE' THEN has_sequence_privilege(one, need)
    ELSE has_schema_privilege(one, need) END)
FROM (
  SELECT 'TABLE', c.oid, n.nspname, c.relname, c.relowner, ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p', 'v')
  UNION ALL
  SELECT 'SEQUENCE', c.oid, n.nspname, c.relname, c.relowner, ARRAY['USAGE']
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
  UNION ALL
  SELECT 'SCHEMA', oid, NULL, nspname, nspowner, ARRAY['USAGE', 'CREATE'] FROM pg_namespace
) AS everything (kind, one, place, name, owner, needs)
WHERE strpos(%s::text, name) > 0
"""


#: A table by its name, in its schema; where none is named, on the search path, or in a `public` that is not to be used.
ON_TABLE: Final = """
SELECT format('%%I.%%I', n.nspname, c.relname), quote_ident(n.nspname), has_schema_privilege(n.oid, 'USAGE'),
  ARRAY(SELECT need FROM unnest(%s::text[]) AS need WHERE NOT has_table_privilege(c.oid, need)),
  quote_ident(current_user)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relname = %s AND (
  n.nspname = %s::text OR %s::text IS NULL AND (
    pg_table_is_visible(c.oid) OR n.nspname = 'public' AND NOT has_schema_privilege(n.oid, 'USAGE')))
"""


class MissingRights(NamedTuple):
    """Rights that the user lacks on an object."""

    kind: str
    quoted: str
    name: str
    owner: str | None
    """Who owns it, None where that is the user."""
    user: str
    rights: Sequence[str]

    @property
    def remedy(self) -> str:
        """The remedy."""
        if not self.rights:
            return f"Only its owner may do that: run it as {self.owner}"
        for_setup = ", CREATE for `delayline setup` only" if self.kind == "SCHEMA" and len(self.rights) > 1 else ""
        return (
            f"Run as its owner{for_setup}: GRANT {', '.join(self.rights)} ON {self.kind} {self.quoted} TO {self.user}"
        )


def missing_rights(connection: Connection, needed: Mapping[Table, Sequence[str]]) -> list[str]:
    """Return the GRANT statements for missing rights on existing tables."""
    schemas, grants = {}, []
    for table, needs in needed.items():
        for quoted, schema, may_use, rights, user in run(
            connection, ON_TABLE, list(needs), table.name, table.schema, table.schema
        ):
            if not may_use:
                schemas[schema] = f"GRANT USAGE ON SCHEMA {schema} TO {user};"
            if rights:
                grants.append(f"GRANT {', '.join(rights)} ON TABLE {quoted} TO {user};")
    return [*schemas.values(), *grants]


def remedy(connection: Connection, refusal: str) -> str:
    """Return the rights to grant after a refusal by PostgreSQL."""
    named = [
        lacking
        for lacking in map(MissingRights._make, run(connection, LACKING, refusal))
        if lacking.rights or lacking.owner
    ]
    if not named:
        return RIGHTS_REMEDY
    best = max(_likeness(lacking, refusal) for lacking in named)
    return "; ".join(lacking.remedy for lacking in named if _likeness(lacking, refusal) == best)


def _likeness(lacking: MissingRights, refusal: str) -> tuple[bool, int]:
    """Return how surely the refusal is about that: in most languages the name comes last."""
    return refusal.endswith(lacking.name), len(lacking.name)
