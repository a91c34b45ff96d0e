"""The one place that composes: delayline.toml, DELAYLINE_* variables and flags become settings, URLs become objects."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from delayline.delayed.delivery import StoredDelivery
from delayline.endpoint import DEFAULT_CONCURRENCY, CriticalErrorAction, Endpoint
from delayline.errors import ConfigurationError
from delayline.memory import MemoryDelayedMessageStore, MemoryTransport
from delayline.outgoing import check_endpoint_name
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.clock import Clock
    from delayline.delayed.store import DelayedMessageStore
    from delayline.recoverability import Recoverability
    from delayline.transport import Transport

FILE_NAME: Final = "delayline.toml"
PREFIX: Final = "DELAYLINE_"
MEMORY: Final = "memory"

Read = Callable[[Any], Any]


def _whole(at_least: int) -> Read:
    def read(value: object) -> int:
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"must be a whole number of {at_least} or more")
        return value

    return read


def _seconds(value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= timedelta.max.total_seconds():
        raise ValueError("must be a number of seconds above 0")
    return seconds


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004 - one kind of error for every value that cannot work
    return check_endpoint_name(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    return value


def _url(value: object) -> str:
    url = _text(value)
    if re.match(r"[A-Za-z][\w+.-]*:", url) is None:
        raise ValueError("must be a URL")
    return url


def _mode(value: object) -> TransactionMode:
    if isinstance(value, TransactionMode):
        return value
    name = str(value).strip().upper().replace("-", "_").replace(" ", "_")
    if name not in TransactionMode.__members__:
        raise ValueError(f"must be one of {', '.join(TransactionMode.__members__)}{_did_you_mean(name, _MODES)}")
    return TransactionMode[name]


_MODES: Final = tuple(TransactionMode.__members__)


def _setting(default: Any, read: Read, text: str, example: str) -> Any:  # noqa: ANN401 - typed where it is assigned
    return field(default=default, metadata={"read": read, "text": text, "example": example})


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """Everything that can be set from outside, checked. Passwords in its URLs never show in its repr."""

    endpoint: str | None = _setting(None, _name, "Name of the endpoint; its queue carries it.", "sales")
    url: str = _setting("sqlite:///delayline.db", _url, "Where queues and delayed messages are.", "sqlite:///my.db")
    store_url: str | None = _setting(None, _url, "Where delayed messages are, if not at url.", "sqlite:///my.db")
    transport_url: str | None = _setting(None, _url, "Where queues are, if not at url.", "sqlite:///my.db")
    table_name: str | None = _setting(
        None, _text, "Table of the delayed messages; {endpoint}.timeouts if left out.", "sales.timeouts"
    )
    error_queue: str = _setting("error", _name, "Queue of messages that failed for good.", "error")
    number_of_retries: int = _setting(0, _whole(0), "Further attempts to forward a due message.", "7")
    transaction_mode: TransactionMode | None = _setting(  # noqa: RUF009 - a field, made by dataclasses.field
        None, _mode, f"{', '.join(_MODES)}; the strongest possible if left out.", "TRANSACTION_SCOPE"
    )
    concurrency: int = _setting(DEFAULT_CONCURRENCY, _whole(1), "Messages handled at once.", "4")
    batch_size: int = _setting(500, _whole(1), "Due messages forwarded at once.", "500")
    batch_bytes: int = _setting(16 * 1024 * 1024, _whole(1), "Bytes forwarded at once.", "16777216")
    maximum_recovery_failures_per_second: int = _setting(
        1, _whole(1), "Failures to move failed messages before a critical error.", "1"
    )
    store_circuit_breaker_seconds: float = _setting(
        30.0, _seconds, "How long storing may fail before a critical error.", "30"
    )
    fetch_circuit_breaker_seconds: float = _setting(
        30.0, _seconds, "How long fetching may fail before a critical error.", "30"
    )
    dispatch_circuit_breaker_seconds: float = _setting(
        30.0, _seconds, "How long dispatching may fail before a critical error.", "30"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                object.__setattr__(self, one.name, _checked(one.name, value, Source("argument", "{name}={example!r}")))

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.name}={_shown(getattr(self, one.name))!r}" for one in fields(self))
        return f"Settings({shown})"

    @property
    def where_messages_wait(self) -> str:
        """The URL of the delayed message store."""
        return self.store_url or self.url

    @property
    def where_queues_are(self) -> str:
        """The URL of the transport."""
        return self.transport_url or self.url

    @property
    def named_endpoint(self) -> str:
        """The endpoint's name; raises ConfigurationError, saying how to give one, where there is none."""
        if self.endpoint is None:
            raise ConfigurationError(
                f"no endpoint is named: use --endpoint NAME, the variable {PREFIX}ENDPOINT, "
                f'or endpoint = "NAME" in {FILE_NAME}'
            )
        return self.endpoint


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from, and how a right one is written there."""

    place: str
    form: str


_KNOWN: Final = {one.name: one.metadata for one in fields(Settings)}


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of Settings."""
    return tuple(_KNOWN)


def describe_setting(name: str) -> str:
    """Return the one-line explanation of a setting: for help texts and the reference page."""
    return str(_KNOWN[name]["text"])


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Return the command line flag of a setting."""
    return "--" + name.replace("_", "-")


def load_settings(
    config: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Return the settings of `config` (else ./delayline.toml where there is one), the environment and `flags`.

    Later ones win; a flag that is None was not given. Raises ConfigurationError naming the value, its place and the
    remedy.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, (value, source) in (_from_file(config) | _from_environment(environ) | _from_flags(flags or {})).items():
        values[name] = _checked(name, value, source)
    return Settings(**values)


Sourced = dict[str, tuple[object, Source]]


def _from_file(config: Path | str | None) -> Sourced:
    path = Path(FILE_NAME if config is None else config)
    if config is None and not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}. Check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}. Write lines such as: batch_size = 500") from error
    for name in table:
        if name not in _KNOWN:
            known = f"The settings are: {', '.join(_KNOWN)}"
            raise ConfigurationError(f"{path} has an unknown setting {name!r}{_did_you_mean(name, _KNOWN)}. {known}")
    return {name: (value, Source(str(path), "{name} = {example}")) for name, value in table.items()}


def _from_environment(environ: Mapping[str, str]) -> Sourced:
    variables = {variable_of(name): name for name in _KNOWN}
    for given in environ:
        close = difflib.get_close_matches(given, variables, 1, 0.9) if given.startswith(PREFIX) else []
        if close and given not in variables:
            raise ConfigurationError(f"the variable {given} is no setting; did you mean {close[0]}? Rename or unset it")
    return {
        name: (environ[variable], Source(f"the variable {variable}", f"{variable}={{example}}"))
        for variable, name in variables.items()
        if environ.get(variable)
    }


def _from_flags(flags: Mapping[str, object]) -> Sourced:
    return {
        name: (value, Source(f"the flag {flag_of(name)}", f"{flag_of(name)} {{example}}"))
        for name, value in flags.items()
        if value is not None
    }


def _checked(name: str, value: object, source: Source) -> object:
    metadata = _KNOWN[name]
    try:
        return metadata["read"](value)
    except ValueError as error:
        example = source.form.format(name=name, example=metadata["example"])
        raise ConfigurationError(
            f"{name} = {_shown(value)!r} (from {source.place}) {error}. Write for example: {example}"
        ) from None


def _did_you_mean(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def masked(url: str) -> str:
    """Return the URL without passwords: for people, logs and errors."""
    url = re.sub(r"(//[^/@:]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)\b(password|passwd|pwd|secret|accountkey|odbc_connect)=[^&;]*", r"\1=***", url)


def _shown(value: object) -> object:
    if isinstance(value, TransactionMode):
        return value.name
    return masked(value) if isinstance(value, str) else value


def transport_from(url: str) -> Transport:
    """Return a new transport on the queues at `url`; raises ConfigurationError naming the supported schemes."""
    if in_memory(url):
        return MemoryTransport()
    _must_be_sql(url, "transport")
    from delayline.sql import SqlTransport

    return SqlTransport(url)


def store_from(url: str, *, table_name: str | None = None) -> DelayedMessageStore:
    """Return a new delayed message store at `url`; raises ConfigurationError naming the supported schemes."""
    if in_memory(url):
        return MemoryDelayedMessageStore()
    _must_be_sql(url, "delayed message store")
    from delayline.sql import SqlDelayedMessageStore

    return SqlDelayedMessageStore(url, table_name=table_name)


def must_exist(url: str) -> None:
    """Raise BackendUnusable where opening what is at `url` would make it, empty."""
    _must_be_sql(url, "database")
    from delayline.sql import urls

    urls.must_exist(url)


async def examine(url: str) -> Sequence[tuple[str, bool, str]]:
    """Return what was looked at in the back end at `url`, whether it is as it should be, and what it is."""
    _must_be_sql(url, "database")
    from delayline.sql import urls

    return await urls.examine(url)


async def planned_setup(settings: Settings, queues: Sequence[str]) -> Sequence[str]:
    """Return the SQL that setting the endpoint up, with further queues, would run; nothing is made or changed."""
    _must_be_sql(settings.where_queues_are, "transport")
    _must_be_sql(settings.where_messages_wait, "delayed message store")
    from delayline.sql import SqlDelayedMessageStore, SqlTransport

    names = list(queues)
    statements: list[str] = []
    if settings.endpoint is not None:
        names = [settings.endpoint, settings.error_queue, *names]
        store = SqlDelayedMessageStore(settings.where_messages_wait, table_name=settings.table_name)
        statements += await store.planned_infrastructure(settings.endpoint)
    statements += await SqlTransport(settings.where_queues_are).planned_infrastructure(names)
    return list(dict.fromkeys(statements)) if settings.where_queues_are == settings.where_messages_wait else statements


def in_memory(url: str) -> bool:
    """Tell whether what is at `url` is gone with the process."""
    return _scheme_of(url) == MEMORY


def _must_be_sql(url: str, what: str) -> None:
    """Raise ConfigurationError for a scheme of no room; only here and below it SQLAlchemy is loaded, which is slow."""
    from delayline.sql.urls import SCHEMES

    if _scheme_of(url) not in SCHEMES:
        known = ", ".join(f"{name}:" for name in sorted((MEMORY, *SCHEMES)))
        raise ConfigurationError(f"no {what} for the URL {masked(url)!r}. The supported schemes are {known}")


def _scheme_of(url: str) -> str:
    """Return the URL's technology: `postgresql` of `postgresql+psycopg://...`."""
    return url.partition(":")[0].partition("+")[0].lower()


def delivery_from(settings: Settings, *, polling: bool = True) -> StoredDelivery:
    """Return stored delayed delivery as the settings say; without polling it stores only."""
    return StoredDelivery(
        store_from(settings.where_messages_wait, table_name=settings.table_name),
        number_of_retries=settings.number_of_retries,
        time_to_trigger_store_circuit_breaker=timedelta(seconds=settings.store_circuit_breaker_seconds),
        time_to_trigger_fetch_circuit_breaker=timedelta(seconds=settings.fetch_circuit_breaker_seconds),
        time_to_trigger_dispatch_circuit_breaker=timedelta(seconds=settings.dispatch_circuit_breaker_seconds),
        maximum_recovery_failures_per_second=settings.maximum_recovery_failures_per_second,
        batch_size=settings.batch_size,
        batch_bytes=settings.batch_bytes,
        polling=polling,
    )


class EndpointOverrides(TypedDict, total=False):
    """What a program may decide itself, past the settings: arguments of Endpoint."""

    recoverability: Recoverability | None
    send_only: bool
    on_critical_error: CriticalErrorAction
    setup_infrastructure: bool
    clock: Clock | None


def endpoint_from(settings: Settings, *, polling: bool = True, **overrides: Unpack[EndpointOverrides]) -> Endpoint:
    """Return the endpoint that the settings describe, not started yet. Raises ConfigurationError."""
    return Endpoint(
        settings.named_endpoint,
        transport=transport_from(settings.where_queues_are),
        delayed_delivery=delivery_from(settings, polling=polling),
        transaction_mode=settings.transaction_mode,
        error_queue=settings.error_queue,
        concurrency=settings.concurrency,
        **overrides,
    )
