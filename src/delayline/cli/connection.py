"""Opens the transport and store of a command, and closes them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.backends import backend_of
from delayline.clock import SystemClock, latest_of
from delayline.composition import endpoint_from
from delayline.opening import refuse_memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.endpoint import Endpoint
    from delayline.settings import Settings
    from delayline.sql.schema import TableGroup


def table_groups(*, migrations: bool = False) -> Mapping[str, TableGroup]:
    """Register the tables of features, for their versions and upgrades, and return their groups by name.

    Args:
        migrations: Include migrations' tables, which need the extra `spark` and take seconds to import.
    """
    from delayline.bulk import cold_catalog, dispatchers, job_tables, stream_claims
    from delayline.sql.actions import ACTIONS
    from delayline.sql.schedules import SCHEDULES
    from delayline.sql.shards.versions import SHARD_MAPS
    from delayline.telemetry import history

    groups = [cold_catalog.COLD_TIER, dispatchers.DISPATCHERS, job_tables.JOBS, stream_claims.STREAM_CLAIMS]
    groups += [history.MINUTES, SCHEDULES, ACTIONS, SHARD_MAPS]
    if migrations:
        from delayline.migration.journal import MIGRATIONS

        groups.append(MIGRATIONS)
    return {group.feature: group for group in groups}


def sending_endpoint(settings: Settings) -> Endpoint:
    """Return the endpoint for storing and sending only; `delayline setup` has created its tables and queues."""
    refuse_memory(settings)
    endpoint = endpoint_from(settings, polling=False, send_only=True, setup_infrastructure=False)
    for url in (settings.resolved_store_url, settings.resolved_transport_url):
        backend_of(url).must_exist(url)
    return endpoint


def start_of_delay(clock: Clock | None) -> datetime:
    """Return the present time, to which a delay is added, on `clock` or on the machine's."""
    return latest_of(clock or SystemClock())()
