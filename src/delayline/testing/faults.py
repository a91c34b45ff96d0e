"""Things that go wrong on purpose: what, at which call, and what happens then."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.transaction import Transaction

Result = TypeVar("Result")
TransactionType = TypeVar("TransactionType", bound="Transaction")

#: The methods by which stores of either kind, six verbs or batches, do one thing.
STORE: Final = ("store", "store_many")
FETCH: Final = ("fetch_next_due", "fetch_due")
REMOVE: Final = ("remove", "remove_many")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong in a FaultyStore, a FaultyTransport, its receivers, or their transactions."""

    on: str | tuple[str, ...]
    """The methods it strikes: `fetch_due`, `dispatch`, `receive`, ...; for transactions `commit` and `rollback`."""
    error: BaseException | None = None
    """What the call raises."""
    calls: int | range | None = None
    """Which calls it strikes, counted from 1 since it was injected: the third, range(2, 5), or every one."""
    takes_effect: bool = False
    """Whether a call that raises `error` has been carried out all the same; a commit that was not is rolled back."""
    when: Callable[..., bool] | None = None
    """Strikes, and counts, only calls with arguments for which this is true."""
    before: Callable[[], object] | None = None
    """Runs before the call is carried out; os.kill fits here."""
    until: asyncio.Event | None = None
    """What the call then waits for before it is carried out or fails."""
    after: Callable[[], object] | None = None
    """Runs after the call was carried out."""

    def concerns(self, method: str, arguments: tuple[object, ...]) -> bool:
        """Tell whether a call of `method` counts."""
        methods = (self.on,) if isinstance(self.on, str) else self.on
        return method in methods and (self.when is None or self.when(*arguments))

    def strikes(self, number: int) -> bool:
        """Tell whether the call of that number is one of those that go wrong."""
        if self.calls is None:
            return True
        return number == self.calls if isinstance(self.calls, int) else number in self.calls


class Faulty:
    """What every faulty part has: faults to inject and a count of its calls."""

    def __init__(self, *faults: Fault) -> None:
        self._faults: list[tuple[Fault, Counter[str]]] = []
        self._calls: Counter[str] = Counter()
        self._under_way = 0
        self._idle = asyncio.Event()
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Let these go wrong from now on, besides those injected before."""
        self._faults += [(fault, Counter()) for fault in faults]

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self._faults.clear()

    def calls(self, *methods: str) -> int:
        """Return how often the methods were called, together."""
        return sum(self._calls[method] for method in methods)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, other than a `receive` or one that a fault makes wait."""
        return self._under_way > 0

    async def quiet(self) -> None:
        """Return once no call is under way, other than a `receive` or one that a fault makes wait."""
        while self.busy:
            self._idle.clear()
            await self._idle.wait()

    async def _call(
        self,
        method: str,
        carry_out: Callable[[], Awaitable[Result]],
        *arguments: object,
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> Result:
        struck = self._struck_by(method, arguments)
        failing = next((fault for fault in struck if fault.error is not None), None)
        for fault in struck:
            if fault.before is not None:
                fault.before()
            if fault.until is not None:
                await fault.until.wait()
        if failing is not None and not failing.takes_effect:
            if undo is not None:
                await self._counted(method, undo)
            raise _fresh(failing)
        result = await self._counted(method, carry_out)
        for fault in struck:
            if fault.after is not None:
                fault.after()
        if failing is not None:
            raise _fresh(failing)
        return result

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

    def _struck_by(self, method: str, arguments: tuple[object, ...]) -> list[Fault]:
        self._calls[method] += 1
        struck = []
        for fault, number in self._faults:
            if fault.concerns(method, arguments):
                number.update(["calls"])
                if fault.strikes(number["calls"]):
                    struck.append(fault)
        return struck

    def _faulty(self, transaction: TransactionType) -> TransactionType:
        """Return the transaction itself, its commit and rollback under the faults.

        The same object, not a wrapper: parts that share it know their own transactions by type.
        """
        commit, rollback = transaction._commit, transaction._rollback
        vars(transaction)["_commit"] = lambda: self._call("commit", commit, undo=rollback)
        vars(transaction)["_rollback"] = lambda: self._call("rollback", rollback)
        return transaction


def _fresh(fault: Fault) -> BaseException:
    """Return the error without the traces of earlier calls."""
    if fault.error is None:
        raise TypeError("only a fault with an error can fail a call")
    return fault.error.with_traceback(None)
