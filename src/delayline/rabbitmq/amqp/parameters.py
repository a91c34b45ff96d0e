"""How a broker is reached, and how it is spoken to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Parameters:
    """A node of a broker, who connects to it, and how long it may take for its answers."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str
    product: str
    """The client, as the broker shows it."""
    connection_name: str
    label: str
    """The broker, as errors name it."""
    tls: ssl.SSLContext | None
    server_name: str | None
    """The name to expect in the broker's certificate."""
    heartbeat: int
    """Seconds; 0 is none. The broker may ask for less."""
    answer_timeout: float
    """Seconds until a broker that does not answer is given up."""
