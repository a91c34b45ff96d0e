"""Shards: databases that an endpoint's messages are spread over, and the map that says which there are.

A message belongs to the shard that the hash of its id says, among those that are active; what a handler sends stays in
the shard of the message that it handles. A new version of the map moves nothing that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, DelaylineError, NotStarted
from delayline.events import Event, emit
from delayline.masking import masked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

logger: logging.Logger = logging.getLogger(__name__)

#: Seconds until a shard that is out of reach is asked again; doubled each time, up to the longest.
FIRST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 5.0
LONGEST_NAME: Final = 60
#: What is raised in a shard that does not answer, or whose part below is not open yet.
OUTAGES: Final = (BackendUnavailable, NotStarted)
#: The measure of how many shards do not answer.
OUT_OF_REACH: Final = "shards.out_of_reach"
KEYS_OF_MAP: Final = frozenset({"version", "shard"})
KEYS_OF_SHARD: Final = frozenset({"name", "url", "schema", "state"})


class ShardState(StrEnum):
    """What a shard takes."""

    ACTIVE = "active"
    """First sends, and what its own messages' handlers send."""
    DRAINING = "draining"
    """No first sends; its messages are dispatched and handled until it is empty."""
    REMOVED = "removed"
    """Nothing: it is empty, and no process opens it. It stays in the map, so that its name is not used again."""


class ShardMapOutdated(BackendUnusable):
    """A newer version of the map of shards is in use than this process has."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A database, or a schema of one, that has a part of the messages."""

    name: str
    """Decides which messages it gets: it must not change, and no other shard may have it later."""
    url: str = field(repr=False)
    schema: str | None = None
    """The schema of its tables; None for the connection's own."""
    state: ShardState = ShardState.ACTIVE

    def __str__(self) -> str:
        schema = "" if self.schema is None else f", schema {self.schema}"
        return f"shard {self.name} ({masked(self.url)}{schema})"


@contextlib.contextmanager
def named_errors(shard: Shard | None) -> Iterator[None]:
    """Have delayline's errors say which shard they are about, if about one."""
    try:
        yield
    except DelaylineError as error:
        if shard is not None:
            error.args = (f"{shard}: {error}", *error.args[1:])
        raise


def chosen(message_id: str, names: Sequence[str]) -> str:
    """Return which of the shards a message belongs to: each id to the one with the highest hash of both.

    So a further shard takes its share from each of the others, and one less gives its own to them: no other id changes
    its shard.
    """
    key = message_id.encode("utf-8", "surrogatepass")
    return max(names, key=lambda name: blake2b(key, digest_size=8, key=name.encode()).digest())


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Which shards there are; a change needs the next version.

    Example:
        >>> from delayline.sql.shards import Shard, ShardMap
        >>> shards = ShardMap(1, (Shard("a", "postgresql://db1/shop"), Shard("b", "postgresql://db2/shop")))
        >>> shards.shard_of("order-17-reminder")
        'b'
    """

    version: int
    """1 or more; the same for all processes but while they are restarted with the next."""
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        if not isinstance(self.version, int) or isinstance(self.version, bool) or self.version < 1:
            raise ConfigurationError(f"the version of a map of shards is a whole number from 1, not {self.version!r}")
        names: set[str] = set()
        places: set[tuple[str, str | None]] = set()
        for shard in self.shards:
            if not isinstance(shard.name, str) or not 1 <= len(shard.name) <= LONGEST_NAME or not shard.name.isascii():
                raise ConfigurationError(
                    f"the name of a shard is 1 to {LONGEST_NAME} ASCII characters, not {shard.name!r}"
                )
            if shard.name in names:
                raise ConfigurationError(f"two shards of the map have the name {shard.name!r}: give each its own")
            names.add(shard.name)
            if shard.state is not ShardState.REMOVED and (shard.url, shard.schema) in places:
                raise ConfigurationError(f"{shard} is in the map twice: leave one out, or give them two schemas")
            places.add((shard.url, shard.schema))
        if not self.active:
            raise ConfigurationError("a map of shards needs a shard that is active: no message could be sent")

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the shards that take first sends."""
        return tuple(shard.name for shard in self.shards if shard.state is ShardState.ACTIVE)

    @property
    def used(self) -> tuple[Shard, ...]:
        """The shards that may have messages."""
        return tuple(shard for shard in self.shards if shard.state is not ShardState.REMOVED)

    @property
    def states(self) -> dict[str, str]:
        """What versions are compared by: the state of each shard by its name."""
        return {shard.name: str(shard.state) for shard in self.shards}

    def shard_of(self, message_id: str) -> str:
        """Return the name of the shard that a first send with that id goes to."""
        return chosen(message_id, self.active)

    @classmethod
    def from_file(cls, path: Path | str) -> ShardMap:
        """Return the map that a TOML file has. Raises ConfigurationError, which says what is wrong in it.

        Args:
            path: The file, with `version = 1` and a `[[shard]]` for each: `name`, `url`, and where needed `schema` and
                `state`.
        """
        path = Path(path)
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigurationError(f"the map of shards {str(path)!r} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the map of shards {str(path)!r} is no TOML: {error}") from error
        try:
            return cls._of(content)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> ShardMap:
        _known(content, KEYS_OF_MAP, "a map of shards")
        listed = content.get("shard")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise ConfigurationError("a map of shards has a [[shard]] for each shard, with its name and url")
        shards = []
        for entry in listed:
            _known(entry, KEYS_OF_SHARD, "a shard")
            for key in ("name", "url"):
                if not isinstance(entry.get(key), str):
                    raise ConfigurationError(f'a shard of the map has no {key}: write {key} = "..." in each [[shard]]')
            state = entry.get("state", ShardState.ACTIVE)
            if state not in [*ShardState]:
                known = ", ".join(ShardState)
                raise ConfigurationError(f"shard {entry['name']!r} has the state {state!r}: there are {known}")
            shards.append(Shard(entry["name"], entry["url"], entry.get("schema"), ShardState(state)))
        return cls(content.get("version", 0), tuple(shards))


def _known(content: Mapping[str, Any], keys: frozenset[str], what: str) -> None:
    unknown = sorted(content.keys() - keys)
    if unknown:
        raise ConfigurationError(f"{what} has no {unknown[0]!r}: it has {', '.join(sorted(keys))}")


@runtime_checkable
class SupportsShards(Protocol):
    """Capability of a transport, a store or a delivery: it is several, one of each shard.

    An endpoint has a poller and a receiver of its own in each of them.
    """

    @property
    def parts(self) -> Mapping[str, Any]:
        """What it is in each shard, by the shards' names."""
        ...

    def shard_of(self, message_id: str) -> str:
        """Return the name of the shard that a first send with that id goes to."""
        ...


class EachShard:
    """Opens something in each shard; in a shard that is out of reach later, while the others work.

    Args:
        what: What is opened, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()
        self.out_of_reach: dict[str, Exception] = {}
        """Why it is not open in a shard, by name."""

    def check(self, name: str) -> None:
        """Raise BackendUnavailable while it is not open in the shard."""
        error = self.out_of_reach.get(name)
        if error is not None:
            raise BackendUnavailable(f"shard {name!r} is out of reach: {error}")

    async def open(self, openings: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
        """Return once it is open in every shard that answers. Raises the outage if none does, and any other error."""
        self.out_of_reach = dict.fromkeys(openings, BackendUnavailable("it is being opened"))
        results = await asyncio.gather(*(opening() for opening in openings.values()), return_exceptions=True)
        failures = {
            name: result for name, result in zip(openings, results, strict=True) if isinstance(result, BaseException)
        }
        self.out_of_reach = {name: error for name, error in failures.items() if isinstance(error, Exception)}
        others = [error for error in failures.values() if not isinstance(error, OUTAGES)]
        if others or len(failures) == len(openings):
            raise (others or list(failures.values()))[0]
        for name, error in self.out_of_reach.items():
            log_text = "shard %s is out of reach for %s, its messages wait: %s"
            emit(logger, logging.ERROR, Event.SHARD_OUT_OF_REACH, log_text, name, self._what, error, shard=name)
            task = asyncio.create_task(self._open_later(name, openings[name]), name=f"delayline shard {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open_later(self, name: str, opening: Callable[[], Awaitable[object]]) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                await opening()
            except Exception as error:
                self.out_of_reach[name] = error
                if not isinstance(error, OUTAGES):
                    log_text = "%s of shard %s cannot be opened, its messages wait: %s"
                    emit(logger, logging.ERROR, Event.SHARD_OUT_OF_REACH, log_text, self._what, name, error, shard=name)
                continue
            self.out_of_reach.pop(name, None)
            emit(logger, logging.INFO, Event.SHARD_REACHED, "%s of shard %s is open", self._what, name, shard=name)
            return

    async def stop(self) -> None:
        """Open no more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.out_of_reach = {}
