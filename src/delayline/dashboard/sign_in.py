"""How often credentials may be tried: each address has a budget of wrong ones, and all addresses together have one."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from delayline.clock import Clock

#: Addresses whose budgets are known; of further ones the addresses that failed longest ago are forgotten.
MOST_ADDRESSES: Final = 1_000
#: An IPv6 client may choose any address of its network.
IPV6_NETWORK: Final = 64


@dataclass(slots=True)
class Budget:
    """Wrong credentials that are answered at once, at most `most`; one comes back each `seconds`."""

    most: int
    seconds: float
    spent: float = 0.0
    at: float = 0.0

    def wait(self, now: float) -> int:
        """Return how many whole seconds pass until the next attempt is answered; 0 for now."""
        self.spent = max(0.0, self.spent - max(0.0, now - self.at) / self.seconds)
        self.at = now
        return max(0, math.ceil((self.spent - (self.most - 1)) * self.seconds))


class SignInLimits:
    """Slows down guesses of credentials, by address and over all; nobody is locked out, each waits for seconds.

    Attempts that are refused cost nothing, so they prolong no wait.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of_all = Budget(most=100, seconds=1.0)
        self._by_address: OrderedDict[str, Budget] = OrderedDict()

    def wait(self, address: str) -> int:
        """Return how many seconds pass until an attempt from there is answered; 0 for now."""
        now, budget = self._now(), self._by_address.get(_network(address))
        return max(self._of_all.wait(now), 0 if budget is None else budget.wait(now))

    def failed(self, address: str) -> None:
        """Note wrong credentials."""
        now, network = self._now(), _network(address)
        budget = self._by_address.setdefault(network, Budget(most=10, seconds=6.0))
        self._by_address.move_to_end(network)
        if len(self._by_address) > MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        for spent in (self._of_all, budget):
            spent.wait(now)
            spent.spent += 1

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_NETWORK), strict=False))
