"""The endpoints of a user's module that `delayline run` and `delayline dashboard` are given, as MODULE:ENDPOINT."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from delayline.backends import backend_of
from delayline.cli.screen import Screen
from delayline.composition import store_of, transport_of
from delayline.endpoint import Endpoint
from delayline.errors import ConfigurationError, DelaylineError
from delayline.settings import PLACES, GivenSetting, Settings, flag_of, given_settings
from delayline.sync import SyncEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from delayline.settings import CommandLine
#: How files begin whose frames are no part of the user's program.
FRAMES_OF_IMPORTS: Final = ("<frozen importlib", importlib.__file__, __file__)


def load_endpoint(target: str) -> Endpoint:
    """Import the Endpoint `module:name`. Raises ConfigurationError with the reason."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{target!r} names no endpoint: write MODULE:ENDPOINT, as in shop.billing:endpoint")
    module = _imported(module_name)
    named = module
    for part in name.split("."):
        if not hasattr(named, part):
            raise ConfigurationError(f"module {module_name!r} has no {name!r}. {_endpoints_of(vars(module), part)}")
        named = getattr(named, part)
    if isinstance(named, SyncEndpoint):
        return named.endpoint
    if not isinstance(named, Endpoint):
        raise ConfigurationError(
            f"{target!r} is a {type(named).__name__}, not an Endpoint. {_endpoints_of(vars(module), name)}"
        )
    return named


def _imported(module_name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(module_name, error) from error
        raise ConfigurationError(
            f"there is no module {error.name!r} in {directory} or among the installed packages. "
            "Run from the directory that holds it"
        ) from error
    except DelaylineError:
        raise
    except Exception as error:
        raise _broken(module_name, error) from error


def _broken(module_name: str, error: Exception) -> DelaylineError:
    """Print the error's trace without the frames of delayline and of the import, and return the last line's error."""
    trace = traceback.TracebackException.from_exception(error)
    chained: traceback.TracebackException | None = trace
    while chained is not None:
        frames = [frame for frame in chained.stack if not frame.filename.startswith(FRAMES_OF_IMPORTS)]
        chained.stack = traceback.StackSummary.from_list(frames)
        chained = chained.__cause__ or chained.__context__
    Screen.show_trace("".join(trace.format()))
    return DelaylineError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}")


def refuse_ignored(endpoint: Endpoint, command_line: CommandLine) -> None:
    """Raise ConfigurationError for settings that were given and that the endpoint does not use.

    It names what is set and what the endpoint has. Settings that cannot be compared are warned of.
    """
    given = given_settings(command_line.config, flags=command_line.flags)
    if (name := given.get("endpoint")) is not None and name.is_flag and name.value != endpoint.name:
        raise ConfigurationError(
            f"--endpoint {name.value!r} is another endpoint than {endpoint.name!r}, which MODULE:ENDPOINT names: "
            "leave it out"
        )
    given = {setting: value for setting, value in given.items() if setting != "endpoint"}
    if isinstance(endpoint.made_from, Settings):
        _refuse_differing(endpoint, given, {setting: getattr(endpoint.made_from, setting) for setting in given})
        return
    if flags := [flag_of(setting) for setting, value in given.items() if value.is_flag]:
        raise ConfigurationError(
            f"{', '.join(flags)} would have no effect on endpoint {endpoint.name!r}, which the module makes of its own "
            f"arguments: leave out the flags, or make it by Endpoint.from_settings({endpoint.name!r}), which reads them"
        )
    used = _in_code(endpoint)
    _refuse_other_places(endpoint, given)
    _refuse_differing(endpoint, {setting: value for setting, value in given.items() if setting in used}, used)
    unknown = [setting for setting in given if setting not in used and setting not in PLACES]
    if unknown:
        Screen.warn(
            f"endpoint {endpoint.name!r} is made of the module's own arguments and reads no settings: "
            f"{', '.join(f'{setting} (from {given[setting].place})' for setting in unknown)}. "
            f"Endpoint.from_settings({endpoint.name!r}) reads them"
        )


def _in_code(endpoint: Endpoint) -> Mapping[str, object]:
    """Return what an endpoint uses for settings, as far as it shows."""
    used: dict[str, object] = {
        "error_queue": endpoint.error_queue,
        "concurrency": endpoint.concurrency,
        "transaction_mode": endpoint.transaction_mode,
    }
    for setting in ("number_of_retries", "batch_size", "batch_bytes"):
        if hasattr(endpoint.delayed_delivery, setting):
            used[setting] = getattr(endpoint.delayed_delivery, setting)
    return used


def _refuse_differing(endpoint: Endpoint, given: Mapping[str, GivenSetting], used: Mapping[str, object]) -> None:
    for setting, value in given.items():
        if value.value != used[setting]:
            raise _differs(endpoint, setting, value, GivenSetting(used[setting], "", is_flag=False).shown)


def _refuse_other_places(endpoint: Endpoint, given: Mapping[str, GivenSetting]) -> None:
    """Compare where the queues and the store are with what is at the URLs that were given."""
    urls: dict[str, Any] = {setting: given[setting].value for setting in PLACES if setting in given}
    settings = Settings(**urls)
    for setting, part in _compared(endpoint, given):
        if part is not endpoint.transport and backend_of(settings.resolved_store_url).native_delays is not None:
            continue  # the queues are there too, and have been compared
        there = transport_of(settings) if part is endpoint.transport else store_of(settings)
        here, wanted = _place(part), _place(there)
        if type(part) is type(there) and (here is None or wanted is None):
            Screen.warn(f"whether endpoint {endpoint.name!r} uses {setting} (from {given[setting].place}) is not known")
        elif here != wanted:
            raise _differs(endpoint, setting, given[setting], here or type(part).__name__)


def _compared(endpoint: Endpoint, given: Mapping[str, GivenSetting]) -> Iterator[tuple[str, object]]:
    """Yield the settings that say where the queues and the store are, each with the part of the endpoint."""
    for specific, part in (("transport_url", endpoint.transport), ("store_url", endpoint.store)):
        setting = specific if specific in given else "url"
        if setting in given and (part is endpoint.transport or part is not endpoint.delayed_delivery):
            yield setting, part


def _place(part: object) -> str | None:
    """Return where the queues or the store are, without passwords; None if that cannot be told."""
    domain = getattr(part, "transaction_domain", None)
    if domain is None or not str(domain).partition(":")[2]:
        domain = getattr(part, "address", None)
    return None if domain is None else str(domain)


def _differs(endpoint: Endpoint, setting: str, given: GivenSetting, used: object) -> ConfigurationError:
    return ConfigurationError(
        f"{setting} = {given.shown!r} (from {given.place}), but endpoint {endpoint.name!r} uses {used!r}. "
        f"Make it by Endpoint.from_settings({endpoint.name!r}), which reads the settings, or leave {setting} out there"
    )


def _endpoints_of(names: dict[str, object], wanted: str) -> str:
    endpoints = [name for name, value in names.items() if isinstance(value, Endpoint | SyncEndpoint)]
    close = difflib.get_close_matches(wanted, endpoints, 1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Its endpoints are: {', '.join(endpoints)}" if endpoints else "It holds no Endpoint object"
