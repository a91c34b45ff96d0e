"""The targets of migrations, one module for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.checks import full_scheme
from delayline.errors import ConfigurationError
from delayline.setting_values import masked
from delayline.spark.schedule import ONE_DAY, STORE_PRODUCTS

if TYPE_CHECKING:
    from datetime import timedelta

    from delayline.migration.target import Target

BROKERS: Final = ("amqp", "amqps")
ACCOUNTS: Final = "azure"
#: A database whose stores receive batches as an endpoint stores them.
NOT_STAGED: Final = "mssql"
NOOP: Final = "noop"


def target_at(
    url: str, *, schema: str | None = None, cold_tier: str | None = None, hot_horizon: timedelta = ONE_DAY
) -> Target | None:
    """Return the target at the URL; None for `noop`.

    Args:
        url: A store's database, a broker, a storage account, or `noop`.
        schema: Schema of the store's tables; by default the connection's.
        cold_tier: Folder or bucket for messages of a store that are due later than `hot_horizon` from now.
        hot_horizon: See `cold_tier`.

    Raises:
        ConfigurationError: The URL has another scheme, or an option that does not fit it.
    """
    scheme = full_scheme(url).partition(":")[0].partition("+")[0].lower()
    if cold_tier is not None:
        if scheme not in STORE_PRODUCTS:
            raise ConfigurationError(f"{masked(url)!r} has no cold tier: only a database with delayline's stores has")
        from delayline.migration.targets.cold_tier import ColdTierStore

        return ColdTierStore(url, cold_tier, hot_horizon=hot_horizon, schema=schema)
    if url == NOOP:
        return None
    if scheme in BROKERS:
        from delayline.migration.targets.rabbitmq_levels import RabbitmqLevelsTarget

        return RabbitmqLevelsTarget(url)
    if scheme == ACCOUNTS:
        from delayline.migration.targets.azure_table import AzureTable

        return AzureTable(url)
    if scheme in STORE_PRODUCTS:
        from delayline.migration.targets.sql_store import SqlStore

        return SqlStore(url, schema=schema)
    if scheme == NOT_STAGED:
        from delayline.migration.targets.plain_store import PlainStore

        return PlainStore(url, schema=schema)
    known = ", ".join(f"{one}:" for one in (*BROKERS, ACCOUNTS, *STORE_PRODUCTS, NOT_STAGED))
    raise ConfigurationError(f"nothing moves to {masked(url)!r}; give a URL that begins with {known}, or {NOOP}")
