"""Pipelines of an endpoint whose queues are in several shards: one in each, which knows of no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Protocol

from delayline.delayed.sharded import CriticalErrorsOfShards, host_of_shard
from delayline.shards import EachShard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from datetime import timedelta

    from delayline.delayed.host import DeliveryHost
    from delayline.receiving.pipeline import Pipeline


class OpenPipeline(Protocol):
    """Opens the pipeline of a shard."""

    def __call__(self, name: str, host: DeliveryHost, concurrency: int) -> Awaitable[Pipeline]:
        """Return it, not started yet. Raises BackendUnavailable."""
        ...


class ShardedPipeline:
    """The pipelines of an endpoint: that of a shard which is out of reach is opened when it answers.

    Args:
        host: The endpoint.
        names: Its shards.
        concurrency: How many messages are handled at once, in all; each shard has its share, and at least 1.
        open_pipeline: Opens the pipeline of a shard.
    """

    def __init__(self, host: DeliveryHost, names: Sequence[str], concurrency: int, open_pipeline: OpenPipeline) -> None:
        self._host = host
        self._names = names
        self._shares = {
            name: max(1, concurrency // len(names) + (place < concurrency % len(names)))
            for place, name in enumerate(names)
        }
        self._open = open_pipeline
        self._errors = CriticalErrorsOfShards(host, len(names))
        self._pipelines: dict[str, Pipeline] = {}
        self._opening = EachShard("its receiver")

    @property
    def running(self) -> int:
        """How many messages are being handled."""
        return sum(pipeline.running for pipeline in self._pipelines.values())

    def measures(self) -> dict[str, float]:
        """Return the greatest of what each pipeline measures."""
        measures: Counter[str] = Counter()
        for pipeline in list(self._pipelines.values()):
            measures |= Counter(pipeline.measures())
        return dict(measures)

    async def begin(self) -> None:
        """Open and start the pipelines. Raises BackendUnavailable if no shard answers."""
        try:
            await self._opening.open({name: partial(self._begin, name) for name in self._names})
        except BaseException:
            await self.stop()
            raise

    async def _begin(self, name: str) -> None:
        host = host_of_shard(self._host, name, self._errors)
        pipeline = await self._open(name, host, self._shares[name])
        pipeline.start()
        self._pipelines[name] = pipeline

    def runs(self, task: asyncio.Task[object] | None) -> bool:
        """Return whether the task runs a handler."""
        return any(pipeline.runs(task) for pipeline in self._pipelines.values())

    async def stop(self, grace: timedelta | None = None) -> None:
        """Take no more messages and let the handlers that run finish. Idempotent."""
        await self._opening.stop()
        await asyncio.gather(*(pipeline.stop(grace) for pipeline in self._pipelines.values()))
