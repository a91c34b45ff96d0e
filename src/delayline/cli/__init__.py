"""The `delayline` command: exit code 0 is done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import logging
from typing import Final

import click

from delayline.cli.actions import actions
from delayline.cli.completion import completion
from delayline.cli.dashboard import dashboard
from delayline.cli.doctor import doctor
from delayline.cli.errors import errors
from delayline.cli.examples import examples
from delayline.cli.find import find
from delayline.cli.migrate import migrate
from delayline.cli.options import Commands
from delayline.cli.options import examples as example_lines
from delayline.cli.pending import cancel, pending, reschedule, send_now
from delayline.cli.queues import limit, pause, peek, purge, queues, resume
from delayline.cli.rabbitmq import rabbitmq
from delayline.cli.run import run
from delayline.cli.schedules import schedules
from delayline.cli.send import send
from delayline.cli.setup import setup
from delayline.cli.spark import spark
from delayline.events import LOGGER_NAME
from delayline.version import __version__

__all__ = ["main"]

QUIET: Final = logging.NullHandler()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=example_lines("delayline setup --endpoint sales", "delayline send --help"),
)
@click.version_option(__version__, prog_name="delayline")
def main() -> None:
    """Durable delayed message delivery: sent now, delivered when due, never lost, never early.

    Settings come from delayline.toml, then DELAYLINE_* variables, then flags; the later wins.
    """
    # Errors are printed once, as the command's last line; `run` shows the log beside it.
    logging.getLogger(LOGGER_NAME).addHandler(QUIET)


PENDING: Final = (find, pending, cancel, reschedule, send_now)
QUEUE_COMMANDS: Final = (queues, peek, pause, resume, limit, purge)
OTHER_COMMANDS: Final = (schedules, errors, actions, doctor, dashboard, rabbitmq, spark, migrate, examples, completion)
command: click.Command
for command in (setup, run, send, *PENDING, *QUEUE_COMMANDS, *OTHER_COMMANDS):
    main.add_command(command)
