"""The sources of migrations, a module for each kind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError
from delayline.migration.sources.apscheduler import APScheduler
from delayline.migration.sources.delayline_store import DelaylineStore
from delayline.migration.sources.nservicebus import NHibernate, NServiceBusSql
from delayline.migration.sources.procrastinate import Procrastinate

if TYPE_CHECKING:
    from delayline.migration.collected import CollectedSource
    from delayline.migration.source import TableSource

TABLES: Final[dict[str, type[TableSource]]] = {
    source.kind: source for source in (NServiceBusSql, NHibernate, DelaylineStore, Procrastinate, APScheduler)
}
#: Sources that are not tables; imported on use, as each needs its own extra.
COLLECTED_SOURCES: Final = {
    "rabbitmq-levels": "RabbitmqLevelsSource",
    "azure-storage": "AzureStorage",
    "ravendb": "RavenDb",
    "celery-levels": "CeleryLevels",
    "celery-scheduled": "CeleryScheduled",
}


def source_at(
    kind: str, url: str, *, schema: str | None = None, journal: str | None = None, **names: str
) -> TableSource:
    """Return the source of that kind.

    Args:
        kind: For example `nservicebus-sql`; an unknown kind raises an error that lists all.
        url: Where the source is.
        schema: Schema of its tables; by default the connection's.
        journal: URL of the database for the journal, for sources that are not databases.
        names: `table` and `container` of Azure Storage.

    Raises:
        ConfigurationError: The kind is unknown, or an argument does not fit it.
    """
    if names and kind != "azure-storage":
        raise ConfigurationError(f"only a source of kind 'azure-storage' has a {' and a '.join(names)} to name")
    if kind in TABLES:
        if journal is not None:
            raise ConfigurationError(f"the journal of a source of kind {kind!r} is in its own database: leave it out")
        return TABLES[kind](url, schema=schema)
    if kind not in COLLECTED_SOURCES:
        raise ConfigurationError(f"no source of kind {kind!r}: choose from {', '.join([*TABLES, *COLLECTED_SOURCES])}")
    if journal is None:
        raise ConfigurationError(f"a source of kind {kind!r} needs a database for the journal: name it with --journal")
    module = import_module(f"{__name__}.{kind.replace('-', '_')}")
    source: type[CollectedSource] = getattr(module, COLLECTED_SOURCES[kind])
    return source(url, journal, schema=schema, **names)
