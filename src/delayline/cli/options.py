"""Shared by all commands: settings as flags, --json, examples in help texts, errors in a line."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

import click

from delayline.cli.screen import Screen
from delayline.errors import (
    BackendUnusable,
    ConfigurationError,
    DelaylineError,
    DispatchFailed,
    InvalidDueTime,
    InvalidMessage,
)
from delayline.opening import other_endpoints
from delayline.setting_values import FILE_NAME
from delayline.settings import (
    CommandLine,
    describe_setting,
    flag_of,
    load_settings,
    setting_names,
    unknown_variables,
    variable_of,
)

EXIT_FAILED: Final = 1
WRONG_USAGE: Final = 2
#: Nothing is wrong as far as could be seen, but something could not be checked; as of monitoring plugins.
EXIT_NOT_CHECKED: Final = 3
#: The key of a click context's `meta` that holds the settings file and flags which were given.
COMMAND_LINE: Final = "delayline.command_line"
#: Likewise: whether a line has --json, and whether its wrong usage has been printed as JSON.
WANTS_JSON: Final = "delayline.wants_json"
USAGE_REPORTED: Final = "delayline.usage_reported"

#: Settings for the place of messages and their endpoint; `run` and `doctor` take all of them.
PLACE_SETTINGS: Final = (
    "endpoint",
    "url",
    "store_url",
    "transport_url",
    "delay_levels_from_seconds",
    "schema",
    "two_phase",
    "timeout_manager",
    "table_name",
    "cold_tier",
    "error_queue",
    "transaction_mode",
)

Command = Callable[..., Any]


class ReportsErrors(click.Command):
    """A command that prints a DelaylineError as a red line instead of a stack trace, with --json as a document."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether the line asks for JSON, which holds for errors in it too."""
        ctx.meta.setdefault(WANTS_JSON, "--json" in args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """Run the command; exit 2 for wrong settings or arguments, 1 for a failure."""
        try:
            return super().invoke(ctx)
        except DelaylineError as error:
            wrong = isinstance(error, ConfigurationError | InvalidMessage | InvalidDueTime)
            code = WRONG_USAGE if wrong else EXIT_FAILED
            Screen.fail(_sentence(error), type(error).__name__, as_json=ctx.meta[WANTS_JSON])
            ctx.exit(code)
        except click.UsageError as error:
            if not ctx.meta.get(USAGE_REPORTED):
                ctx.meta[USAGE_REPORTED] = True  # the groups around see it too
                if ctx.meta[WANTS_JSON]:
                    Screen.print_error(error.format_message(), type(error).__name__)
            raise


class Commands(ReportsErrors, click.Group):
    """A group whose commands report errors likewise."""


def _sentence(error: DelaylineError) -> str:
    """Return the text of the error; for a single send that failed, that of its cause."""
    if isinstance(error, DispatchFailed) and len(error.failures) == 1:
        return str(next(iter(error.failures.values())))
    return str(error)


def examples(*lines: str) -> str:
    """Return the end of a help text that shows the command lines."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Return the command with the options, which its help text lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def settings_options(*names: str) -> Callable[[Command], Command]:
    """Give a command `settings`, with flags for the named settings (all when none is named), and --config."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_settings(*args: object, config: str | None, **arguments: Any) -> Any:  # noqa: ANN401 - click's
            flags = {name: arguments.pop(name) for name in chosen}
            settings = load_settings(config, flags=flags)
            for text in unknown_variables():
                Screen.warn(text)
            click.get_current_context().meta[COMMAND_LINE] = CommandLine(config, flags)
            try:
                return command(*args, settings=settings, **arguments)
            except BackendUnusable as error:
                if others := asyncio.run(other_endpoints(settings)):
                    raise BackendUnusable(f"{error}. But {others}") from error
                raise

        decorated: Command = with_settings
        for name in reversed(chosen):
            description = f"{describe_setting(name)} [{variable_of(name)}]"
            decorated = click.option(flag_of(name), name, metavar="TEXT", help=description)(decorated)
        return click.option(
            "--config", type=click.Path(), help=f"Settings file; ./{FILE_NAME} if it exists.", metavar="FILE"
        )(decorated)

    chosen = names or setting_names()
    return decorate


def without_management_option(command: Command) -> Command:
    """Give a command `without_management`."""
    description = "RabbitMQ: accept what is unknown without the management API: exit code 0."
    return click.option("--without-management", is_flag=True, help=description)(command)


def json_option(command: Command) -> Command:
    """Give a command `screen`, and --json, which makes it print a JSON document for machines."""

    @functools.wraps(command)
    def with_screen(*args: object, as_json: bool, **arguments: Any) -> Any:  # noqa: ANN401 - click's
        return command(*args, screen=Screen(as_json=as_json), **arguments)

    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else; of an error too."
    )(with_screen)
