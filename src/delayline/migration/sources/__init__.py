"""What can be moved away from, one file a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError
from delayline.migration.sources.delayline_store import DelaylineStore
from delayline.migration.sources.nhibernate import NHibernate
from delayline.migration.sources.nservicebus_sql import NServiceBusSql
from delayline.migration.sources.procrastinate import Procrastinate

if TYPE_CHECKING:
    from delayline.migration.source import TableSource

KINDS: Final[dict[str, type[TableSource]]] = {
    one.kind: one for one in (NServiceBusSql, NHibernate, DelaylineStore, Procrastinate)
}


def source_at(kind: str, url: str, *, schema: str | None = None) -> TableSource:
    """Return the source of that kind. Raises ConfigurationError for another one."""
    if kind not in KINDS:
        raise ConfigurationError(f"no source of kind {kind!r}: choose from {', '.join(KINDS)}")
    return KINDS[kind](url, schema=schema)
