"""Several databases, or schemas of one, as a single transport and a single delayed message store."""

from delayline.shards import Shard, ShardMap, ShardMapOutdated, ShardState
from delayline.sql.shards.store import ShardedDelayedMessageStore
from delayline.sql.shards.transport import ShardedTransport

__all__ = ["Shard", "ShardMap", "ShardMapOutdated", "ShardState", "ShardedDelayedMessageStore", "ShardedTransport"]
