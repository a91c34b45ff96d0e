"""Faults to inject into a store, a transport or a timeout persister, and a record of their calls."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from delayline.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

Result = TypeVar("Result")
TransactionType = TypeVar("TransactionType", bound=Transaction)

#: The same operation has a method in a store with six verbs and another in one that supports batches.
STORE: Final = ("store", "store_many")
FETCH: Final = ("fetch_next_due", "fetch_due")
REMOVE: Final = ("remove", "remove_many")
COUNT_FAILURE: Final = ("increment_failure_count", "retry_many")


@dataclass(frozen=True, slots=True)
class Fault:
    """An error, a delay or a hook for chosen calls of a FaultyStore, FaultyTransport or FaultyTimeoutPersister.

    Example:
        The third dispatch sends its messages, but reports an outage::

            transport.inject(Fault("dispatch", BackendUnavailable("down"), calls=3, takes_effect=True))
    """

    on: str | tuple[str, ...]
    """The methods concerned: `fetch_due`, `dispatch`, `receive`, ...; for transactions `commit` and `rollback`."""
    error: BaseException | Callable[..., BaseException | None] | None = None
    """The error to raise; or a function of the call's arguments that returns it, or None for no error."""
    calls: int | range | None = None
    """The calls that fail, counted from 1 since the injection: 3, or range(2, 5); None for every call."""
    takes_effect: bool = False
    """Carry out the call before raising `error`; otherwise a commit that fails is rolled back."""
    when: Callable[..., bool] | None = None
    """Count and fail only calls for whose arguments this function returns True."""
    message_id: str | None = None
    """Count and fail only calls whose arguments include the message with this id."""
    before: Callable[[], object] | None = None
    """Run this before the call is carried out, for example `os.kill`."""
    until: asyncio.Event | None = None
    """Wait for this event before the call is carried out or fails."""
    after: Callable[[], object] | None = None
    """Run this after the call was carried out."""

    def concerns(self, method: str, arguments: tuple[object, ...]) -> bool:
        """Return whether a call of `method` with `arguments` counts."""
        methods = (self.on,) if isinstance(self.on, str) else self.on
        if method not in methods or (self.when is not None and not self.when(*arguments)):
            return False
        return self.message_id is None or self.message_id in _message_ids(arguments)

    def fails(self, number: int) -> bool:
        """Return whether the call with this number, counted from 1, fails."""
        if self.calls is None:
            return True
        return number == self.calls if isinstance(self.calls, int) else number in self.calls


class Call(NamedTuple):
    """A recorded call."""

    method: str
    """The method's name; for transactions `commit` and `rollback`."""
    ids: tuple[str, ...]
    """The ids of the messages among its arguments, in order."""


class Faults:
    """The injected faults and recorded calls of faulty objects.

    Every FaultyStore, FaultyTransport and FaultyTimeoutPersister has them as `faults`. Share an object to inject faults
    in a single place, or to see the order of calls to different objects.

    Example:
        A store and a transport that share their faults::

            faults = Faults()
            store = FaultyStore(MemoryDelayedMessageStore(), shared=faults)
            transport = FaultyTransport(MemoryTransport(), shared=faults)
            ...
            assert [call.method for call in faults.recorded("dispatch", "remove_many")] == ["dispatch", "remove_many"]
    """

    def __init__(self, *faults: Fault) -> None:
        self._faults: list[tuple[Fault, Counter[str]]] = []
        self._calls: list[Call] = []
        self._under_way = 0
        self._idle = asyncio.Event()
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Apply faults from now on, after those injected before; the first that raises wins.

        Args:
            faults: The faults.
        """
        self._faults += [(fault, Counter()) for fault in faults]

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def calls(self, *methods: str) -> int:
        """Return how often the methods were called, together."""
        return len(self.recorded(*methods))

    def recorded(self, *methods: str) -> list[Call]:
        """Return calls, oldest first.

        Args:
            methods: The methods called; all calls if none is given.
        """
        return [call for call in self._calls if not methods or call.method in methods]

    def clear_record(self) -> None:
        """Forget the calls recorded so far."""
        self._calls.clear()

    @property
    def busy(self) -> bool:
        """Whether a call is under way, other than a `receive` or a call that a fault delays."""
        return self._under_way > 0

    async def quiet(self) -> None:
        """Return once no call is under way, other than a `receive` or a call that a fault delays."""
        while self.busy:
            self._idle.clear()
            await self._idle.wait()

    async def call(
        self,
        method: str,
        carry_out: Callable[[], Awaitable[Result]],
        *arguments: object,
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Result:
        """Record a call and carry it out under the faults.

        Args:
            method: The name by which faults refer to the call.
            carry_out: The call itself.
            arguments: The call's arguments, for `Fault.when`, `Fault.error` and `Fault.message_id`.
            undo: Runs instead of `carry_out` when a fault makes the call fail without effect.

        Returns:
            The result of `carry_out`.
        """
        faults, error, takes_effect = self._faults_of(method, arguments)
        for fault in faults:
            if fault.before is not None:
                fault.before()
            if fault.until is not None:
                await fault.until.wait()
        if error is not None and not takes_effect:
            if undo is not None:
                await self._counted(method, undo)
            raise error.with_traceback(None)  # a single instance, raised often, would collect tracebacks
        result = await self._counted(method, carry_out)
        for fault in faults:
            if fault.after is not None:
                fault.after()
        if error is not None:
            raise error.with_traceback(None)
        return result

    def apply_to(self, transaction: TransactionType) -> TransactionType:
        """Return the transaction itself, with its commit and rollback under the faults.

        It is the same object, not a wrapper: stores and transports recognise their own transactions by type.
        """
        commit, rollback = transaction._commit, transaction._rollback
        vars(transaction)["_commit"] = lambda: self.call("commit", commit, undo=rollback)
        vars(transaction)["_rollback"] = lambda: self.call("rollback", rollback)
        return transaction

    async def _counted(self, method: str, carry_out: Callable[[], Awaitable[Result]]) -> Result:
        if method == "receive":
            return await carry_out()
        self._under_way += 1
        try:
            return await carry_out()
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def _faults_of(self, method: str, arguments: tuple[object, ...]) -> tuple[list[Fault], BaseException | None, bool]:
        """Record the call; return its faults, the error to raise and whether the call takes effect before it."""
        self._calls.append(Call(method, _message_ids(arguments)))
        failing = []
        for fault, number in self._faults:
            if fault.concerns(method, arguments):
                number.update(["calls"])
                if fault.fails(number["calls"]):
                    failing.append(fault)
        for fault in failing:
            error = fault.error(*arguments) if callable(fault.error) else fault.error
            if error is not None:
                return failing, error, fault.takes_effect
        return failing, None, False


class Faulty:
    """Base of the faulty wrappers."""

    _inner: Any
    """The wrapped object."""

    def __init__(self, *faults: Fault, shared: Faults | None = None) -> None:
        self.faults: Faults = Faults() if shared is None else shared
        self.faults.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Apply the faults from now on, after faults injected before; the first that raises wins."""
        self.faults.inject(*faults)

    def heal(self) -> None:
        """Remove all faults."""
        self.faults.heal()

    def calls(self, *methods: str) -> int:
        """Return how often the methods were called, together."""
        return self.faults.calls(*methods)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, other than a `receive` or a call that a fault delays."""
        return self.faults.busy

    async def quiet(self) -> None:
        """Return once no call is under way, other than a `receive` or a call that a fault delays."""
        await self.faults.quiet()


FaultyType = TypeVar("FaultyType", bound=Faulty)


def with_capabilities(
    kind: type[FaultyType], inner: object, capabilities: Iterable[Any], **members: object
) -> FaultyType:
    """Return a wrapper, not yet initialized, with the capabilities of the wrapped object.

    Coroutines of a capability pass the faults, with the arguments that are given by position; a transaction's commit
    and rollback do, and everything else is passed on.

    Args:
        kind: The wrapper's class; the result is of a subclass.
        inner: The wrapped object.
        capabilities: The protocols of which the wrapper claims those that `inner` fulfils.
        members: Members to use in place of passing a capability's of that name on.
    """
    for capability in capabilities:
        if isinstance(inner, capability):
            for name, declared in vars(capability).items():
                if not name.startswith("_") and not hasattr(kind, name):
                    members.setdefault(name, _member(name, declared))
    claimed = {name: member for name, member in members.items() if hasattr(inner, name)}
    return object.__new__(type(kind.__name__, (kind,), claimed))


def _member(name: str, declared: object) -> object:
    if isinstance(declared, property):
        return property(attrgetter(f"_inner.{name}"))
    if name == "transaction":
        return lambda self: self.faults.apply_to(self._inner.transaction())
    if not inspect.iscoroutinefunction(declared):
        return lambda self, *arguments, **named: getattr(self._inner, name)(*arguments, **named)

    async def under_faults(self: Faulty, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - as declared
        shown = [value for value in arguments if value is not None and not isinstance(value, Transaction)]
        return await self.faults.call(name, lambda: getattr(self._inner, name)(*arguments, **named), *shown)

    return under_faults


def _message_ids(arguments: tuple[object, ...]) -> tuple[str, ...]:
    """Return the ids of the messages that the first argument holds: a message, several, or operations with messages."""
    first = arguments[0] if arguments else ()
    items = first if isinstance(first, list | tuple) else (first,)
    ids = (getattr(getattr(item, "message", item), "id", None) for item in items)
    return tuple(id for id in ids if isinstance(id, str))
