"""A private RabbitMQ node for the scenarios: the tests' own, with the settings that RabbitMQ comes with."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

from tests.servers.rabbitmq import RabbitmqServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class UnhamperedServer(RabbitmqServer):
    """The tests' node may use one core only, and counts often: several fit on a machine. This one is to be measured."""

    settings: ClassVar[Sequence[str]] = ("log.console = false", "log.file.level = warning")
    advanced: ClassVar[str] = "[].\n"

    def _environment(self) -> dict[str, str]:
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        return super()._environment() | {"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": loopback}


@contextlib.contextmanager
def rabbitmq() -> Iterator[str]:
    """Provide the URL of an empty virtual host on a node of its own."""
    with rabbitmq_server() as server:
        yield server.new_vhost()


@contextlib.contextmanager
def rabbitmq_server() -> Iterator[UnhamperedServer]:
    """Provide a node of its own."""
    with contextlib.closing(UnhamperedServer()) as server:
        yield server
