"""Lets Alembic ignore delayline's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delayline.sql.schema import OWN_PREFIX, STORE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable


def include_name(*table_names: str) -> Callable[[str | None, str, Any], bool]:
    """Return an `include_name` for Alembic's `context.configure`: autogenerate then drops none of delayline's tables.

    It leaves out every table whose name begins with `delayline_` or ends in `.timeouts`, and the tables named here.

    Args:
        table_names: The `table_name` of stores that have it.

    Returns:
        A function of a name, its type and its parents' names; False for a table of delayline.
    """
    named = frozenset(table_names)

    def include(name: str | None, type_: str, parent_names: Any) -> bool:  # noqa: ANN401 - Alembic's mapping
        del parent_names
        if type_ != "table" or name is None:
            return True
        return not (name.startswith(OWN_PREFIX) or name.endswith(STORE_SUFFIX) or name in named)

    return include
