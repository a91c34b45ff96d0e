"""Acknowledgements of one channel, which leave in batches."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pamqp import commands

from delayline.errors import BackendUnavailable
from delayline.rabbitmq.amqp.channel import retrieve_exception

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.rabbitmq.amqp.channel import Channel


class Acknowledgements:
    """Writes the acknowledgements of one turn of the loop: as one, where nothing before them is still open.

    Args:
        first_open: returns the lowest tag that is not acknowledged yet.
    """

    def __init__(self, first_open: Callable[[], int]) -> None:
        self._first_open = first_open
        self._channel: Channel | None = None
        self._tags: set[int] = set()
        self._writing: set[asyncio.Task[None]] = set()
        self._answer: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return how many are not written yet."""
        return len(self._tags)

    def add(self, channel: Channel | None, tag: int) -> None:
        """Acknowledge the message with the others of this turn."""
        self._channel = channel
        if not self._tags:
            writing = asyncio.create_task(self._write())
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
        self._tags.add(tag)

    def forget(self) -> None:
        """Drop those of a channel that is lost."""
        self._channel = None
        self._tags.clear()

    async def written(self) -> None:
        """Return once every acknowledgement so far is written."""
        await asyncio.gather(*self._writing)

    def answer(self, channel: Channel) -> asyncio.Task[None]:
        """Return the task that ends when the broker has answered a method that follows those of this turn."""
        if self._answer is None:
            self._answer = asyncio.create_task(self._await_answer(channel))
            self._answer.add_done_callback(retrieve_exception)
        return self._answer

    async def _await_answer(self, channel: Channel) -> None:
        self._answer = None  # later acknowledgements may be written after the method
        await self.written()
        await channel.call(commands.Channel.Flow(active=True))

    async def _write(self) -> None:
        channel, tags = self._channel, self._tags
        if channel is None or not tags:
            return
        self._tags = set()
        first_open = self._first_open()
        whole = [tag for tag in tags if tag < first_open]
        with contextlib.suppress(BackendUnavailable):
            if whole:
                channel.acknowledge(max(whole), multiple=True)
            for tag in tags.difference(whole):
                channel.acknowledge(tag)
