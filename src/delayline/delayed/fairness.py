"""Fairness: a busy destination, or a busy tenant, delays no other.

Messages with the same value of what fairness goes by are a group. While no more is due than a batch takes, batches are
by due time alone. While more is due (a backlog), each batch takes messages of several groups in turn: of a group that
has only a few all of them, and what is left of the batch from the busy ones in equal shares. Within a group messages
leave by due time.

A store looks for groups with due messages now and then, by an index, however many of them a group has. Between two
looks it asks only groups that had due messages and were not exhausted since (`Turns`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from delayline.errors import ConfigurationError, CorruptHeaders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delayline.message import DelayedMessage, Message

BY_DESTINATION: Final = "destination"
BY_HEADER: Final = "header:"
#: The most characters of a group's name: values of headers that are longer, or not printable, are hashed.
LONGEST_GROUP: Final = 100
#: The group of messages without the header, and of messages that were stored before fairness went by it.
NO_GROUP: Final = " "


@dataclass(frozen=True, slots=True)
class FairBy:
    """What fairness goes by: a message's destination, or the value of one of its headers."""

    header: str | None = None
    """The header's name; None for the destination."""

    @classmethod
    def of(cls, text: str) -> FairBy:
        """Return what `destination` or `header:NAME` says. Raises ConfigurationError for any other text."""
        if text == BY_DESTINATION:
            return cls()
        if text.startswith(BY_HEADER) and (header := text.removeprefix(BY_HEADER)).strip():
            return cls(header)
        raise ConfigurationError(
            f"fair_by={text!r} is neither 'destination' nor 'header:NAME': write for example fair_by='header:Tenant'"
        )

    def __str__(self) -> str:
        return BY_DESTINATION if self.header is None else BY_HEADER + self.header

    def group_of(self, message: DelayedMessage) -> str:
        """Return the group that a message belongs to."""
        return message.destination if self.header is None else self.group_in_queue(message.message)

    def group_in_queue(self, message: Message) -> str:
        """Return the group that a message belongs to among those of its destination."""
        if self.header is None:
            return NO_GROUP
        try:
            value = message.headers.get(self.header, NO_GROUP)
        except CorruptHeaders:
            return NO_GROUP
        if len(value) <= LONGEST_GROUP and value.isprintable():
            return value if value.strip() else NO_GROUP
        return hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()


def fair_within_queues(text: str) -> FairBy:
    """Return what `header:NAME` says; raises ConfigurationError also for `destination`: a queue has only one."""
    fair_by = FairBy.of(text)
    if fair_by.header is None:
        raise ConfigurationError(
            f"fair_by={text!r} of a transport means nothing, as all messages of a queue have the same destination: "
            "name a header, as in fair_by='header:Tenant', or give fair_by to the StoredDelivery alone"
        )
    return fair_by


@runtime_checkable
class SupportsFairness(Protocol):
    """Capability: serve groups of due messages in turn."""

    def be_fair(self, fair_by: FairBy) -> None:
        """Serve groups in turn from now on; called before the store is set up and opened.

        Raises ConfigurationError where the store cannot.

        Args:
            fair_by: What makes messages a group.
        """
        ...


def served_fairly(store: object) -> SupportsFairness:
    """Return the store if it can serve groups in turn; raises ConfigurationError if it cannot."""
    if not isinstance(store, SupportsFairness):
        raise ConfigurationError(
            f"{type(store).__name__} cannot serve destinations or tenants in turn: use a SqlDelayedMessageStore, "
            "or leave out fair_by"
        )
    return store


class Turn(NamedTuple):
    """The turn of a group in a batch."""

    group: str
    since: Any
    """What the due column keeps of the earliest message to look at."""
    most: int
    """The most messages to take."""


class Served(NamedTuple):
    """What the turns of a batch have given."""

    groups: Mapping[str, tuple[int, Any]]
    """How many messages were found of each group that had some, and the due time from which on it is asked again."""
    cut: bool
    """Whether the batch ended because it was full, perhaps before every group was asked."""


@dataclass(slots=True)
class DueGroup:
    """A group with due messages."""

    since: Any
    busy: bool = False
    """Whether it had as many messages as it could give at its last turn."""


class Turns:
    """The groups that have due messages, in the order of their turns."""

    def __init__(self) -> None:
        self._groups: dict[str, DueGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def known(self) -> Sequence[str]:
        """The names of the groups, in order."""
        return sorted(self._groups)

    def found_others(self, groups: Iterable[tuple[str, Any]]) -> None:
        """Note further groups that have due messages, with their earliest due times; they get the last turns."""
        for name, since in groups:
            self._groups.setdefault(name, DueGroup(since))

    def found(self, groups: Iterable[tuple[str, Any]]) -> None:
        """Note all groups that have due messages, with their earliest due times; new ones get the last turns."""
        earliest = dict(groups)
        known = {
            name: DueGroup(earliest.pop(name), group.busy) for name, group in self._groups.items() if name in earliest
        }
        self._groups = known | {name: DueGroup(since) for name, since in earliest.items()}

    def next(self, limit: int) -> Sequence[Turn]:
        """Return the turns of a batch of up to `limit` messages, which ends when it has so many.

        Groups that may have only a few come first: what they leave goes to the busy ones.
        """
        groups = list(islice(self._groups.items(), limit))
        if not groups:
            return []
        share, busy = max(1, limit // len(groups)), sum(group.busy for _, group in groups)
        of_busy = -(-limit // busy) if busy else share
        turns = [Turn(name, group.since, of_busy if group.busy else share) for name, group in groups]
        return sorted(turns, key=lambda turn: self._groups[turn.group].busy)

    def served(self, turns: Sequence[Turn], served: Served) -> None:
        """Note what the turns have given: groups with messages left get their next turn behind all others."""
        last = max((position for position, turn in enumerate(turns) if turn.group in served.groups), default=-1)
        for position, turn in enumerate(turns):
            number, since = served.groups.get(turn.group, (0, None))
            if number < turn.most and not (served.cut and position >= last):
                self._groups.pop(turn.group, None)
            elif number and self._groups.pop(turn.group, None) is not None:
                self._groups[turn.group] = DueGroup(since, busy=True)
