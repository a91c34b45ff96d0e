"""Routes: which queue messages of a type go to where `send` names none."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from delayline.errors import ConfigurationError, InvalidMessage
from delayline.serialization import PLAIN_TYPES, name_of_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_NAMED: Final = 20
#: Texts up to this length are taken for a destination whose body was forgotten.
SHOWN: Final = 200
SIMILAR: Final = 2


class Routes:
    """The queues that messages go to by their type; a subclass without a route has the one of its nearest base.

    Args:
        routes: The queue of each type.

    Raises:
        ConfigurationError: A key is no class whose values are messages, or a queue has no name.
    """

    def __init__(self, routes: Mapping[type, str] | None = None) -> None:
        self._queues: dict[type, str] = {}
        for kind, queue in (routes or {}).items():
            self.add(kind, queue)

    def add(self, kind: type, queue: str) -> None:
        """Route messages of the type to the queue. Raises ConfigurationError, also for a second queue."""
        if not isinstance(kind, type) or kind is object or issubclass(kind, tuple(PLAIN_TYPES - {tuple})):
            raise ConfigurationError(
                f"a route is for a class of messages, such as a dataclass, not {_shown(kind)}: dicts, texts and "
                "numbers have no type of their own, so name their destination in send"
            )
        if not isinstance(queue, str) or not queue:
            raise ConfigurationError(f"the route of {name_of_kind(kind)} must be the name of a queue, not {queue!r}")
        known = self._queues.setdefault(kind, queue)
        if known != queue:
            raise ConfigurationError(f"messages of type {name_of_kind(kind)} go to {known!r} already, not to {queue!r}")

    @property
    def queues(self) -> list[str]:
        """The queues that messages go to."""
        return list(dict.fromkeys(self._queues.values()))

    def find(self, value: object) -> str | None:
        """Return the queue that the value goes to; None for none."""
        return next((self._queues[kind] for kind in type(value).__mro__ if kind in self._queues), None)

    def queue_for(self, value: object) -> str:
        """Return the queue that the value goes to. Raises InvalidMessage, naming the routes."""
        if (queue := self.find(value)) is not None:
            return queue
        if isinstance(value, str) and len(value) <= SHOWN:
            raise InvalidMessage(f"send({value!r}) has no body: give send({value!r}, body)")
        name = name_of_kind(type(value))
        raise InvalidMessage(
            f"send has no destination, and type {name} has no route: give send(destination, body), or "
            f"Endpoint(routes={{{type(value).__name__}: ...}}). {self._known(name)}"
        )

    def _known(self, name: str) -> str:
        if not self._queues:
            return "The endpoint has no routes"
        routes = {name_of_kind(kind): queue for kind, queue in self._queues.items()}
        close = difflib.get_close_matches(name, routes, n=SIMILAR)
        named = [*close, *sorted(routes.keys() - set(close))][:MOST_NAMED]
        more = "" if len(named) == len(routes) else f" and {len(routes) - len(named)} more"
        return f"The routes are {', '.join(f'{kind} to {routes[kind]!r}' for kind in named)}{more}"


def _shown(kind: Any) -> str:  # noqa: ANN401 - whatever was given
    return name_of_kind(kind) if isinstance(kind, type) else repr(kind)[:SHOWN]
