"""Where settings come from: a file, the environment, the flags of a command."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError
from delayline.setting_values import SHOWN, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE_NAME: Final = "delayline.toml"
PREFIX: Final = "DELAYLINE_"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from, and how a right one is written there."""

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
                f"{path} has an unknown setting {name[:SHOWN]!r}{did_you_mean(name, known)}. {names}"
            )
    return {name: (value, Source(str(path), "{name} = {example}")) for name, value in table.items()}


def from_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> Sourced:
    """Return the values of the environment variables for settings. Raises ConfigurationError for a likely typo."""
    for given in environ:
        close = difflib.get_close_matches(given, variables, 1, 0.9) if given.startswith(PREFIX) else []
        if close and given not in variables:
            raise ConfigurationError(
                f"the variable {given} is not a setting; did you mean {close[0]}? Rename or unset it"
            )
    return {
        name: (environ[variable], Source(f"the variable {variable}", f"{variable}={{example}}"))
        for variable, name in variables.items()
        if environ.get(variable)
    }


def from_flags(flags: Mapping[str, object], flag_of: Callable[[str], str]) -> Sourced:
    """Return the flags that were given; None stands for one that was not."""
    return {
        name: (value, Source(f"the flag {flag_of(name)}", f"{flag_of(name)} {{example}}"))
        for name, value in flags.items()
        if value is not None
    }
