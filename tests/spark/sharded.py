"""A map of shards, each set up, that tests look at."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from click.testing import CliRunner
from tests.spark.stores import ENDPOINT, StoreAt

from delayline.cli import main
from delayline.spark import JobTarget
from delayline.sql import SqlTransport
from delayline.sql.shards import ShardedDelayedMessageStore, ShardMap

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

NAMES: Final = ("one", "two", "three")


class Shards:
    """A file with a map of shards, each of which is set up, with a journal and a queue."""

    def __init__(self, folder: Path, urls: dict[str, str]) -> None:
        self.folder = folder
        self.urls = urls
        self.file = folder / "shards.toml"
        self.url = f"shards:{self.file}"
        self.target = JobTarget(self.url, endpoint=ENDPOINT)
        self.write(1, dict.fromkeys(urls, "active"))
        self.set_up()
        self.stores = {name: StoreAt(url) for name, url in urls.items()}

    def write(self, version: int, states: dict[str, str]) -> None:
        """Write a version of the map."""
        entries = [
            f'[[shard]]\nname = "{name}"\nurl = "{self.urls[name]}"\nstate = "{state}"\n'
            for name, state in states.items()
        ]
        self.file.write_text("\n".join([f"version = {version}", *entries]))

    @property
    def map(self) -> ShardMap:
        """The map as it is in the file."""
        return ShardMap.from_file(self.file)

    def set_up(self) -> None:
        """Make the version of the map the one that is in use."""
        asyncio.run(ShardedDelayedMessageStore(self.map, journal=True).setup_infrastructure(ENDPOINT))
        for shard in self.map.used:
            asyncio.run(SqlTransport(shard.url).setup_infrastructure(["billing"]))

    def command(self, *words: str) -> Result:
        """Run a command on them."""
        return CliRunner().invoke(main, [*words, "--endpoint", ENDPOINT, "--url", self.url])

    def ids(self) -> dict[str, list[str]]:
        """Return the ids that wait in each shard."""
        return {name: store.ids() for name, store in self.stores.items()}


def divided(ids: list[str], shards: ShardMap) -> dict[str, list[str]]:
    """Return the ids that belong to each shard."""
    return {shard.name: sorted(key for key in ids if shards.shard_of(key) == shard.name) for shard in shards.used}
