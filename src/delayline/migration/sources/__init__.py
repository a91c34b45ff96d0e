"""The sources of migrations, a module for each kind; other distributions add kinds by an entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Final

from delayline.errors import ConfigurationError
from delayline.migration.collected import CollectedSource
from delayline.migration.source import TableSource

#: Imported on use, as some need an extra of their own.
OWN_SOURCES: Final = {
    "nservicebus-sql": "nservicebus:NServiceBusSql",
    "nhibernate": "nservicebus:NHibernate",
    "delayline": "delayline_store:DelaylineStore",
    "procrastinate": "procrastinate:Procrastinate",
    "apscheduler": "apscheduler:APScheduler",
    "rabbitmq-levels": "rabbitmq_levels:RabbitmqLevelsSource",
    "azure-storage": "azure_storage:AzureStorage",
    "celery-levels": "celery_levels:CeleryLevels",
    "celery-scheduled": "celery_scheduled:CeleryScheduled",
}
#: The group of entry points that name the classes of other sources by kind.
SOURCE_GROUP: Final = "delayline.migration_sources"


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
    source = _source_of(kind)
    if not issubclass(source, CollectedSource):
        if journal is not None:
            raise ConfigurationError(f"the journal of a source of kind {kind!r} is in its own database: leave it out")
        return source(url, schema=schema)
    if journal is None:
        raise ConfigurationError(f"a source of kind {kind!r} needs a database for the journal: name it with --journal")
    return source(url, journal, schema=schema, **names)


def _source_of(kind: str) -> type[TableSource]:
    source: type[TableSource]
    if kind in OWN_SOURCES:
        module, _, name = OWN_SOURCES[kind].partition(":")
        source = getattr(import_module(f"{__name__}.{module}"), name)
        return source
    installed = {entry.name: entry for entry in entry_points(group=SOURCE_GROUP)}
    if kind not in installed:
        known = ", ".join([*OWN_SOURCES, *sorted(installed)])
        raise ConfigurationError(f"no source of kind {kind!r}: choose from {known}")
    try:
        source = installed[kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the source {installed[kind].value!r} of kind {kind!r} cannot be imported: {error}. "
            "Reinstall its distribution"
        ) from error
    if not (isinstance(source, type) and issubclass(source, TableSource)):
        raise ConfigurationError(f"the source {installed[kind].value!r} of kind {kind!r} is no subclass of TableSource")
    return source
