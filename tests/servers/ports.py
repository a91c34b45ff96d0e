"""Free ports for servers that tests start, kill and start again."""

from __future__ import annotations

import itertools
import random
import socket
from typing import Final

#: RabbitMQ's management API listens so far above AMQP, as on the ports that it comes with.
MANAGEMENT_ABOVE: Final = 10_000
#: Below 32 768 as those above, for from there the system gives ports to outgoing connections. One of them may take a
#: port before its server does, or while the server is down.
PORTS: Final = range(12_768, 22_768)

_shuffled = itertools.cycle(random.SystemRandom().sample(PORTS, len(PORTS)))  # each process in another order


def free_port(*, above: int = 0) -> int:
    """Return a port that is free, as is the one so far above it; each call returns another."""
    return next(port for port in _shuffled if _is_free(port) and _is_free(port + above))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
