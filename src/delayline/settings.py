"""Settings: delayline.toml, DELAYLINE_* variables and flags, checked."""

from __future__ import annotations

import contextlib
import logging
import os
import tomllib
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from delayline import setting_values
from delayline.endpoint import DEFAULT_CONCURRENCY
from delayline.errors import ConfigurationError
from delayline.events import Event, emit
from delayline.masking import masked
from delayline.setting_values import FILE_NAME, VARIABLE_PREFIX, Source, from_environment, from_file, from_flags
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

logger: logging.Logger = logging.getLogger(__name__)

#: Where the messages are when no URL is set: a file in the current directory.
DEFAULT_URL: Final = "sqlite:///delayline.db"


def _setting(default: Any, read: setting_values.Read, text: str, example: str) -> Any:  # noqa: ANN401 - typed where it is assigned
    return field(default=default, metadata={"read": read, "text": text, "example": example})


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """Everything that can be set from outside, checked. Passwords in its URLs never show in its repr."""

    endpoint: str | None = _setting(None, setting_values.name, "Name of the endpoint; its queue carries it.", "sales")
    url: str = _setting(DEFAULT_URL, setting_values.url, "Where queues and delayed messages are.", "sqlite:///my.db")
    store_url: str | None = _setting(
        None, setting_values.url, "Where delayed messages are, if not at url.", "sqlite:///my.db"
    )
    transport_url: str | None = _setting(
        None, setting_values.url, "Where queues are, if not at url.", "sqlite:///my.db"
    )
    delay_levels_from_seconds: float | None = _setting(
        None,
        setting_values.seconds_or_none,
        "With queues on RabbitMQ and a store: delays of so many seconds or more wait in the broker.",
        "60",
    )
    schema: str | None = _setting(
        None,
        setting_values.text,
        "Schema of the tables in SQL databases; the connection's own, on SQL Server dbo, if left out.",
        "messaging",
    )
    two_phase: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Join transactions of queues and store in two SQL databases by a two-phase commit.",
        "true",
    )
    table_name: str | None = _setting(
        None, setting_values.text, "Table of the delayed messages; {endpoint}.timeouts if left out.", "sales.timeouts"
    )
    journal: bool | None = _setting(
        None,
        setting_values.yes_or_no,
        "Record the events of each message in the SQL journal; once set up, it stays on.",
        "true",
    )
    inbox_url: str | None = _setting(
        None,
        setting_values.url,
        "SQL database of the handlers' rows: each message is recorded there, and handled once.",
        "sqlite:///my.db",
    )
    inbox_seconds: float = _setting(
        86_400.0, setting_values.seconds, "How long the inbox keeps the record of a message.", "86400"
    )
    outbox_url: str | None = _setting(
        None,
        setting_values.url,
        "SQL database in which sends with transaction= are kept, if neither queues nor store are there.",
        "sqlite:///my.db",
    )
    history: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Write a row a minute of what each process has done, to the SQL store's database, for the dashboard.",
        "true",
    )
    cold_tier: str | None = _setting(
        None,
        setting_values.text,
        "Folder or URI of the Parquet files in which far messages wait; needs the extra spark.",
        "s3://bucket/sales",
    )
    timeout_manager: bool = _setting(
        False,
        setting_values.yes_or_no,
        "Keep delayed messages in a timeout manager, whose storage is at store_url or url, not in a store.",
        "true",
    )
    timeout_manager_outage_seconds: float = _setting(
        120.0,
        setting_values.seconds_or_none,
        "How long a timeout manager's storage may be out of reach before a critical error.",
        "120",
    )
    timeouts_url: str | None = _setting(
        None, setting_values.url, "Where an old timeout manager's timeouts are, to be drained.", "sqlite:///my.db"
    )
    disable_timeout_manager: bool = _setting(False, setting_values.yes_or_no, "Drain it no more.", "true")
    error_queue: str = _setting("error", setting_values.name, "Queue of messages that failed for good.", "error")
    number_of_retries: int = _setting(0, setting_values.whole(0), "Further attempts to forward a due message.", "7")
    transaction_mode: TransactionMode | None = _setting(  # noqa: RUF009 - a field, made by dataclasses.field
        None,
        setting_values.mode,
        f"{', '.join(setting_values.TRANSACTION_MODES)}; the strongest possible if left out.",
        "TRANSACTION_SCOPE",
    )
    concurrency: int = _setting(DEFAULT_CONCURRENCY, setting_values.whole(1), "Messages handled at once.", "4")
    batch_size: int = _setting(500, setting_values.whole(1), "Due messages forwarded at once.", "500")
    batch_bytes: int = _setting(
        16 * 1024 * 1024, setting_values.whole(1, 2**63 - 1), "Bytes forwarded at once.", "16777216"
    )
    fair_by: str | None = _setting(
        None,
        setting_values.text,
        "destination, or header:NAME: a backlog for one of them delays due messages for no other.",
        "destination",
    )
    queues_fair_by: str | None = _setting(
        None,
        setting_values.text,
        "header:NAME: a backlog in a queue for one value of that header delays the receiving of no other.",
        "header:Tenant",
    )
    maximum_recovery_failures_per_second: int = _setting(
        1, setting_values.whole(1), "Failures to move failed messages before a critical error.", "1"
    )
    store_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long storing may fail before a critical error.", "30"
    )
    fetch_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long fetching may fail before a critical error.", "30"
    )
    dispatch_circuit_breaker_seconds: float = _setting(
        30.0, setting_values.seconds, "How long dispatching may fail before a critical error.", "30"
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                checked = _checked(setting.name, value, Source("argument", "{name}={example!r}"))
                object.__setattr__(self, setting.name, checked)

    def __repr__(self) -> str:
        shown = ", ".join(f"{setting.name}={_shown(getattr(self, setting.name))!r}" for setting in fields(self))
        return f"Settings({shown})"

    @property
    def resolved_store_url(self) -> str:
        """The URL of the delayed message store."""
        return self.store_url or self.url

    @property
    def resolved_transport_url(self) -> str:
        """The URL of the transport."""
        return self.transport_url or self.url

    @property
    def resolved_outbox_url(self) -> str | None:
        """The URL of the outbox; None for none."""
        return self.outbox_url or self.inbox_url

    @property
    def inbox_window(self) -> timedelta | None:
        """How long a message that was handled is known; None without an inbox."""
        return None if self.inbox_url is None else timedelta(seconds=self.inbox_seconds)

    @property
    def named_endpoint(self) -> str:
        """The endpoint's name; raises ConfigurationError, saying how to give a name, where there is none."""
        if self.endpoint is None:
            raise ConfigurationError(
                f"no endpoint is named: use --endpoint NAME, the variable {VARIABLE_PREFIX}ENDPOINT, "
                f'or endpoint = "NAME" in {FILE_NAME}'
            )
        return self.endpoint


_KNOWN: Final = {setting.name: setting.metadata for setting in fields(Settings)}

#: The settings that say where queues and delayed messages are.
PLACES: Final = ("url", "store_url", "transport_url")


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of Settings."""
    return tuple(_KNOWN)


def describe_setting(name: str) -> str:
    """Return the short explanation of a setting: for help texts and the reference page."""
    return str(_KNOWN[name]["text"])


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return VARIABLE_PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Return the command line flag of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """A setting that was given, checked, and where."""

    value: object
    place: str
    """Such as `the variable DELAYLINE_URL`."""
    is_flag: bool

    @property
    def shown(self) -> object:
        """The value without passwords, for errors."""
        return _shown(self.value)


def given_settings(
    config: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Mapping[str, GivenSetting]:
    """Return the settings that were given, as `load_settings` reads them, by their names."""
    environ = os.environ if environ is None else environ
    variables = {variable_of(name): name for name in _KNOWN}
    flagged = from_flags(flags or {}, flag_of)
    given = from_file(config, _KNOWN) | from_environment(environ, variables) | flagged
    return {
        name: GivenSetting(_checked(name, value, source), source.place, name in flagged)
        for name, (value, source) in given.items()
    }


def load_settings(
    config: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Return the settings of `config` (else ./delayline.toml if it exists), the environment and `flags`.

    Later sources win; a flag that is None was not given. Raises ConfigurationError naming the value, its place and the
    remedy.
    """
    given = given_settings(config, environ=environ, flags=flags)
    values: dict[str, Any] = {name: setting.value for name, setting in given.items()}
    return Settings(**values)


def unknown_variables() -> list[str]:
    """Return a sentence about each DELAYLINE_* variable of this process that is no setting."""
    return setting_values.unknown_variables(os.environ, {variable_of(name): name for name in _KNOWN})


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What `delayline run` was given, for the endpoints of the module that it imports."""

    config: Path | str | None = None
    flags: Mapping[str, object] = field(default_factory=dict)


_COMMAND_LINE: Final[ContextVar[CommandLine]] = ContextVar("delayline command line")


@contextlib.contextmanager
def given_on_command_line(command_line: CommandLine) -> Iterator[None]:
    """Let endpoints that are made from settings meanwhile read these flags too."""
    token = _COMMAND_LINE.set(command_line)
    try:
        yield
    finally:
        _COMMAND_LINE.reset(token)


def settings_of_process(name: str | None = None, config: Path | str | None = None) -> Settings:
    """Return the settings of this process: file, environment, and the flags of `delayline run` if it runs in it.

    Args:
        name: The endpoint's name, which the program decides; None to read it like the others.
        config: The file, in place of ./delayline.toml; `--config` of the command replaces it.
    """
    command_line = _COMMAND_LINE.get(CommandLine())
    for text in unknown_variables():
        emit(logger, logging.WARNING, Event.UNKNOWN_VARIABLE, "%s", text)
    flags = dict(command_line.flags) | ({} if name is None else {"endpoint": name})
    return load_settings(config if command_line.config is None else command_line.config, flags=flags)


def _checked(name: str, value: object, source: Source) -> object:
    metadata = _KNOWN[name]
    try:
        return metadata["read"](value)
    except ValueError as error:
        example = metadata["example"]
        example = source.form.format(name=name, example=example, toml=_in_toml(example))
        raise ConfigurationError(
            f"{name} = {_shown(value)!r} (from {source.place}) {error}. Write for example: {example}"
        ) from None


def _in_toml(example: str) -> str:
    try:
        tomllib.loads(f"example = {example}")
    except tomllib.TOMLDecodeError:
        return f'"{example}"'
    return example


def _shown(value: object) -> object:
    if isinstance(value, TransactionMode):
        return value.name
    shown = masked(value) if isinstance(value, str) else value
    if isinstance(value, int) and abs(value) > 10**setting_values.LONGEST_SHOWN_TEXT:
        return f"{value.bit_length()} bits"  # as text it has thousands of digits
    return (
        f"{shown[: setting_values.LONGEST_SHOWN_TEXT]}..."
        if isinstance(shown, str) and len(shown) > setting_values.LONGEST_SHOWN_TEXT
        else shown
    )
