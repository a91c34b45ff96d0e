"""Settings from a file, the environment or the flags of a command, and the parsing of their values."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from delayline.checks import full_scheme
from delayline.errors import ConfigurationError
from delayline.message import UNUSABLE_IN_IDS
from delayline.outgoing import check_endpoint_name
from delayline.transaction import TransactionMode

FILE_NAME: Final = "delayline.toml"
VARIABLE_PREFIX: Final = "DELAYLINE_"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from, and how a right value is written there."""

    place: str
    form: str


Sourced = dict[str, tuple[object, Source]]
"""Settings by their names, each with its source."""


def from_file(config: Path | str | None, known: Mapping[str, object]) -> Sourced:
    """Return the contents of the file, by default of delayline.toml if it exists. Raises ConfigurationError."""
    path = Path(FILE_NAME if config is None else config)
    if config is None and not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}. Check --config") from error
    except (ValueError, RecursionError) as error:  # also of an integer with thousands of digits, and of nested arrays
        raise ConfigurationError(f"{path} is not TOML: {error}. Write lines such as: batch_size = 500") from error
    for name in table:
        if name not in known:
            names = f"The settings are: {', '.join(known)}"
            raise ConfigurationError(
                f"{path} has an unknown setting {name[:LONGEST_SHOWN_TEXT]!r}{did_you_mean(name, known)}. {names}"
            )
    return {name: (value, Source(str(path), "{name} = {toml}")) for name, value in table.items()}


#: Variables that are no settings: of single commands, and of the tests and tools of delayline itself.
OTHER_VARIABLES: Final = re.compile(
    "DELAYLINE_(DASHBOARD_TOKEN|DASHBOARD_USERS|MIGRATE_(SOURCE|TARGET|JOURNAL)|TRANSFER_(SOURCE|TARGET)"
    "|REQUIRE_SERVICES|SERVERS_ROOT|TESTS?_[A-Z_]+|SEED|ROUNDS|SCREENSHOTS|DEBIAN_MIRROR)"
)


def unknown_variables(environ: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Return a sentence about each variable that begins as settings do and is none."""
    return [
        f"the variable {given} is not a setting and has no effect{_variable_meant(given, variables)}"
        for given in sorted(environ)
        if given.startswith(VARIABLE_PREFIX) and given not in variables and not OTHER_VARIABLES.fullmatch(given)
    ]


def _variable_meant(given: str, variables: Mapping[str, str]) -> str:
    """Return a hint by what follows the prefix, which would make all names alike."""
    word = given.removeprefix(VARIABLE_PREFIX)
    names = [variable.removeprefix(VARIABLE_PREFIX) for variable in variables]
    close = difflib.get_close_matches(word, names, 1) or [name for name in names if word and word in name]
    return f"; did you mean {VARIABLE_PREFIX}{close[0]}?" if close else ""


def from_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> Sourced:
    """Return the values of the environment variables for settings.

    Raises ConfigurationError for a likely typo, and for a variable that is empty: a deployment has failed to fill it.
    """
    for given in environ:
        close = difflib.get_close_matches(given, variables, 1, 0.9) if given.startswith(VARIABLE_PREFIX) else []
        if close and given not in variables:
            raise ConfigurationError(
                f"the variable {given} is not a setting; did you mean {close[0]}? Rename or unset it"
            )
    for variable in variables:
        if environ.get(variable) == "":
            raise ConfigurationError(f"the variable {variable} is set and empty: give it a value, or unset it")
    return {
        name: (environ[variable], Source(f"the variable {variable}", f"{variable}={{example}}"))
        for variable, name in variables.items()
        if variable in environ
    }


def from_flags(flags: Mapping[str, object], flag_of: Callable[[str], str]) -> Sourced:
    """Return the flags that were given; None stands for a flag that was not given."""
    return {
        name: (value, Source(f"the flag {flag_of(name)}", f"{flag_of(name)} {{example}}"))
        for name, value in flags.items()
        if value is not None
    }


Read = Callable[[Any], Any]
"""Parses a setting's text; raises ValueError with the expected form."""

#: The largest whole number that every server and driver takes as a limit.
LARGEST_LIMIT: Final = 2**31 - 1
#: Characters of a value that is shown, or looked up.
LONGEST_SHOWN_TEXT: Final = 200
TRANSACTION_MODES: Final = tuple(TransactionMode.__members__)


def whole(at_least: int, at_most: int = LARGEST_LIMIT) -> Read:
    """Read a whole number."""

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,19}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ValueError(f"must be a whole number of {at_least} or more")
        if value > at_most:
            raise ValueError(f"must be a whole number of {at_least} to {at_most}")
        return value

    return read


def seconds(value: object) -> float:
    """Read a length of time."""
    number = _number(value)
    if not 0 < number <= timedelta.max.total_seconds():
        raise ValueError("must be a number of seconds above 0")
    return number


def seconds_or_none(value: object) -> float:
    """Read a length of time that may be zero."""
    number = _number(value)
    if not 0 <= number <= timedelta.max.total_seconds():
        raise ValueError("must be a number of seconds of 0 or more")
    return number


def yes_or_no(value: object) -> bool:
    """Read true or false."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, str):
        value = words.get(value.strip().lower())
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - one kind of error for every value that cannot work
    return value


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        return -1.0


def name(value: object) -> str:
    """Read the name of an endpoint or queue."""
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004 - one kind of error for every value that cannot work
    return check_endpoint_name(value)


def text(value: object) -> str:
    """Read any text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    if UNUSABLE_IN_IDS.search(value) is not None:
        raise ValueError("must be UTF-8 text without NUL")
    return value


def url(value: object) -> str:
    """Read a URL; its scheme is looked at when something is opened there. `postgres:` is `postgresql:`."""
    read = full_scheme(text(value))
    if re.match(r"[A-Za-z][\w+.-]*:", read) is None:
        raise ValueError("must be a URL")
    return read


def mode(value: object) -> TransactionMode:
    """Read a transaction mode, however it is spelt."""
    if isinstance(value, TransactionMode):
        return value
    word = str(value)[:LONGEST_SHOWN_TEXT].strip().upper().replace("-", "_").replace(" ", "_")
    if word not in TransactionMode.__members__:
        raise ValueError(f"must be one of {', '.join(TRANSACTION_MODES)}{did_you_mean(word, TRANSACTION_MODES)}")
    return TransactionMode[word]


def did_you_mean(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return a hint where a known word is close."""
    close = difflib.get_close_matches(word[:LONGEST_SHOWN_TEXT], known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
