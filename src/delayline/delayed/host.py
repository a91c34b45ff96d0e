"""Whose messages a delayed delivery keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delayline.clock import Clock
    from delayline.transaction import TransactionMode
    from delayline.transport import Transport


@dataclass(frozen=True, slots=True)
class DeliveryHost:
    """What a delayed delivery learns from the endpoint it belongs to."""

    endpoint_name: str
    transport: Transport
    mode: TransactionMode
    error_queue: str
    clock: Clock
    """What the endpoint goes by: the one it was given, else the delivery's, else this machine's."""
    critical_error: Callable[[str, Exception], None]
    """Reports a fault that lasted too long; returns at once."""
