"""The targets of migrations, a module for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.backends import BulkRoute, find_backend, schemes_with
from delayline.clock import ONE_DAY
from delayline.errors import ConfigurationError
from delayline.masking import masked

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.migration.target import Target

NOOP: Final = "noop"


def target_at(
    url: str, *, schema: str | None = None, cold_tier: str | None = None, hot_horizon: timedelta = ONE_DAY
) -> Target | None:
    """Return the target at the URL; None for `noop`.

    Args:
        url: A back end's URL, or `noop`.
        schema: Schema of the store's tables; by default the connection's.
        cold_tier: Folder or bucket for messages of a store that are due later than `hot_horizon` from now.
        hot_horizon: See `cold_tier`.

    Raises:
        ConfigurationError: The URL has another scheme, or an option that does not fit it.
    """
    backend = find_backend(url)
    route = None if backend is None or backend.in_process else backend.bulk_route
    if cold_tier is not None:
        if route is not BulkRoute.STAGED_ROWS:
            raise ConfigurationError(
                f"nothing moves to a cold tier of {masked(url)!r}: leave the cold tier out, or use PostgreSQL, "
                "MariaDB or SQLite"
            )
        from delayline.migration.targets.cold_tier import ColdTierStore

        return ColdTierStore(url, cold_tier, hot_horizon=hot_horizon, schema=schema)
    if url == NOOP:
        return None
    match route:
        case BulkRoute.DELAY_LEVELS:
            from delayline.migration.targets.rabbitmq_levels import RabbitmqLevelsTarget

            return RabbitmqLevelsTarget(url)
        case BulkRoute.TABLE_ROWS:
            from delayline.migration.targets.azure_table import AzureTable

            return AzureTable(url)
        case BulkRoute.STAGED_ROWS:
            from delayline.migration.targets.sql_store import SqlStore

            return SqlStore(url, schema=schema)
        case BulkRoute.STORED_ROWS:
            from delayline.migration.targets.plain_store import PlainStore

            return PlainStore(url, schema=schema)
        case BulkRoute.MESSAGES:
            from delayline.migration.targets.messages import MessagesTarget

            return MessagesTarget(url)
    known = ", ".join(f"{scheme}:" for scheme in schemes_with(lambda backend: not backend.in_process))
    raise ConfigurationError(f"nothing moves to {masked(url)!r}; give a URL that begins with {known}, or {NOOP}")
