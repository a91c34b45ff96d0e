"""Migration of pending messages between systems, on Spark: nothing is lost, possible duplicates are listed by id."""

from importlib.util import find_spec

from delayline.errors import MissingExtra

if any(find_spec(name) is None for name in ("pyspark", "pyarrow", "pandas")):
    raise MissingExtra("spark", "moving messages between systems")

from delayline.migration.plan import EndpointPreview, Plan, preview
from delayline.migration.run import Migration, MigrationResult
from delayline.migration.sources import source_at
from delayline.migration.targets import target_at

__all__ = ["EndpointPreview", "Migration", "MigrationResult", "Plan", "preview", "source_at", "target_at"]
