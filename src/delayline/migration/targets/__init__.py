"""What can be moved to, one file a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError
from delayline.setting_values import masked
from delayline.spark.schedule import IN_THE_STORE

if TYPE_CHECKING:
    from delayline.migration.target import Target

BROKERS: Final = ("amqp", "amqps")
NOOP: Final = "noop"


def target_at(url: str, *, schema: str | None = None) -> Target | None:
    """Return the target at the URL, None for `noop`, which is none. Raises ConfigurationError for another scheme."""
    scheme = url.partition(":")[0].partition("+")[0].lower()
    if url == NOOP:
        return None
    if scheme in BROKERS:
        from delayline.migration.targets.rabbitmq_levels import RabbitmqLevels

        return RabbitmqLevels(url)
    if scheme in IN_THE_STORE:
        from delayline.migration.targets.sql_store import SqlStore

        return SqlStore(url, schema=schema)
    known = ", ".join(f"{one}:" for one in (*BROKERS, *IN_THE_STORE))
    raise ConfigurationError(f"nothing moves to {masked(url)!r}; give a URL that begins with {known}, or {NOOP}")
