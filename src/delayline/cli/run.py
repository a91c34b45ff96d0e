"""`delayline run`: run an endpoint until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import importlib
import importlib.util
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delayline.cli.due import delay_given
from delayline.cli.log_format import LOG_FORMATS, LOG_LEVELS, log_to_stderr
from delayline.cli.options import EXIT_FAILED, examples, json_option, settings_options
from delayline.cli.screen import Screen
from delayline.composition import endpoint_from
from delayline.endpoint import GRACE, Endpoint
from delayline.errors import ConfigurationError
from delayline.opening import refuse_memory
from delayline.sync import SyncEndpoint
from delayline.telemetry.http_server import HttpServer
from delayline.telemetry.measurements import Measurements
from delayline.telemetry.probes import Probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from delayline.settings import Settings
    from delayline.telemetry.http_server import Response


@click.command(
    epilog=examples(
        "delayline run shop.billing:endpoint",
        "delayline run shop.billing:endpoint --grace 2m --log-format json",
        "delayline run shop.billing:endpoint --metrics 127.0.0.1:9464",
        "delayline run shop.billing:endpoint --health 127.0.0.1:8081",
        "delayline run --endpoint sales   (dispatches due messages, handles none)",
    )
)
@click.argument("target", required=False, metavar="[MODULE:ENDPOINT]")
@click.option("--verbose", "-v", is_flag=True, help="Log every step: the same as --log-level debug.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="What to log.")
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    show_default=True,
    help="Lines for people, or a JSON document a line.",
)
@click.option(
    "--grace",
    callback=delay_given,
    default="25s",
    show_default=True,
    help="How long running handlers may take after a signal, as in 90s or 5m; then they are cancelled.",
)
@click.option("--log-handled", is_flag=True, help="Log each handled message at INFO.")
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus at http://HOST:PORT/metrics, as in 127.0.0.1:9464.",
)
@click.option("--nservicebus-metrics", is_flag=True, help="Serve them also under the names of NServiceBus.")
@click.option(
    "--opentelemetry",
    is_flag=True,
    help="Report to OpenTelemetry's global providers, as `opentelemetry-instrument` sets them up.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /live, /ready and, with the extra telemetry, /metrics over HTTP, as in 127.0.0.1:8081.",
)
@click.option(
    "--heartbeat",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Touch this file every 5 seconds while the event loop turns.",
)
@settings_options()
@json_option
def run(  # noqa: PLR0913 - the options of the command
    settings: Settings,
    screen: Screen,
    target: str | None,
    verbose: bool,
    grace: timedelta,
    log_level: str,
    log_format: str,
    log_handled: bool,
    metrics: str | None,
    nservicebus_metrics: bool,
    opentelemetry: bool,
    health: str | None,
    heartbeat: Path | None,
) -> None:
    """Run the Endpoint object of a module, found from the current directory, until SIGINT or SIGTERM.

    It then finishes messages in flight within the grace period; the messages of handlers that take longer are handled
    again. A second signal ends it at once. Without a module it runs the endpoint of the settings, which only dispatches
    due messages. Exit code 1 when a critical error stopped it. Under systemd it reports its start, its stop and, with
    WatchdogSec, each turn of its event loop.
    """
    if target is None:
        refuse_memory(settings)
        endpoint = endpoint_from(settings)
    else:
        endpoint = load_endpoint(target)
    level = "debug" if verbose else log_level
    log_to_stderr(level, log_format, endpoint=endpoint.name, handled=log_handled)
    if opentelemetry:
        _opentelemetry(endpoint)
    probes = Probes(Measurements.of(endpoint), heartbeat=heartbeat)
    with contextlib.ExitStack() as serving:
        for server in _servers(endpoint, probes, health, metrics, nservicebus=nservicebus_metrics):
            serving.enter_context(server)
            screen.echo(f"serves {', '.join(f'http://{server.address}{path}' for path in server.paths)}")
        stopped_by = asyncio.run(_run(endpoint, probes, screen, grace))
    screen.echo(f"{endpoint.name} stopped" if stopped_by else f"{endpoint.name} stopped by itself")
    screen.document({"endpoint": endpoint.name, "stopped_by": stopped_by})
    if stopped_by is None:
        Screen.complain(f"endpoint {endpoint.name!r} stopped after a critical error; see the log above")
        click.get_current_context().exit(EXIT_FAILED)


def _servers(
    endpoint: Endpoint, probes: Probes, health: str | None, metrics: str | None, *, nservicebus: bool
) -> list[HttpServer]:
    """Return a server for each address that is asked for; the server of the probes serves the metrics too."""
    wanted: dict[str, dict[str, Callable[[str], Response]]] = {}
    if health is not None:
        wanted[health] = dict(probes.routes())
    if metrics is not None or (health is not None and importlib.util.find_spec("prometheus_client") is not None):
        from delayline.telemetry.prometheus import PrometheusMetrics  # an extra

        exposed = PrometheusMetrics(nservicebus=nservicebus)
        exposed.watch(endpoint)
        for address in {health, metrics} - {None}:
            wanted.setdefault(str(address), {})["/metrics"] = exposed.respond
    return [HttpServer(address, paths) for address, paths in wanted.items()]


def _opentelemetry(endpoint: Endpoint) -> None:
    from delayline.telemetry.opentelemetry import OpenTelemetry  # an extra

    OpenTelemetry().watch(endpoint)


def load_endpoint(target: str) -> Endpoint:
    """Import the Endpoint `module:name`. Raises ConfigurationError with the reason."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{target!r} names no endpoint: write MODULE:ENDPOINT, as in shop.billing:endpoint")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(
            f"there is no module {error.name!r} in {directory} or among the installed packages. "
            "Run from the directory that holds it"
        ) from error
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


async def _run(endpoint: Endpoint, probes: Probes, screen: Screen, grace: timedelta) -> str | None:
    def started() -> None:
        started = _started(endpoint)
        screen.echo(started)
        probes.started(started)

    async with probes:
        return await run_until_stopped(endpoint, started, grace=grace, stopping=probes.stopping)


async def run_until_stopped(
    endpoint: Endpoint,
    started: Callable[[], None],
    *,
    grace: timedelta = GRACE,
    stopping: Callable[[], None] = lambda: None,
    parent_pipe: int | None = None,
) -> str | None:
    """Run the endpoint and return the signal that stopped it, None if it stopped by itself.

    Args:
        endpoint: The endpoint, not started.
        started: Called when it has started.
        grace: How long handlers may take after the signal.
        stopping: Called when it begins to stop.
        parent_pipe: A file descriptor; the end of the process at its other side stops the endpoint too.
    """
    stopped_by: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with _stopped_by_signal(stopped_by, parent_pipe):
        gc.collect()  # before messages are handled, which would wait for it
        gc.freeze()  # full collections would traverse the modules again and again: see production.md
        async with endpoint:
            started()
            by_itself = asyncio.ensure_future(endpoint.wait_stopped())
            either: list[asyncio.Future[Any]] = [stopped_by, by_itself]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            by_itself.cancel()
            stopping()
            await endpoint.stop(grace)
    return stopped_by.result() if stopped_by.done() else None


@contextlib.contextmanager
def _stopped_by_signal(stopped_by: asyncio.Future[str], parent_pipe: int | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        if not stopped_by.done():
            stopped_by.set_result(name)
            return
        Screen.complain(f"{name}, the second signal: ended at once. Messages in flight are handled again")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        os.kill(os.getpid(), getattr(signal, name, signal.SIGTERM))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    if parent_pipe is not None:
        loop.add_reader(parent_pipe, _once(loop, parent_pipe, partial(stop, "parent gone")))
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if parent_pipe is not None:
            loop.remove_reader(parent_pipe)


def _once(loop: asyncio.AbstractEventLoop, descriptor: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` as a reader that is removed before it runs."""

    def run() -> None:
        loop.remove_reader(descriptor)
        work()

    return run


def _started(endpoint: Endpoint) -> str:
    handlers = f"{len(endpoint.handlers)} handler{'' if len(endpoint.handlers) == 1 else 's'}"
    return f"{endpoint.name} runs: {endpoint.transaction_mode.name}, {endpoint.guarantee}, {handlers}. Ctrl+C stops it"


def _endpoints_of(names: dict[str, object], wanted: str) -> str:
    endpoints = [name for name, value in names.items() if isinstance(value, Endpoint | SyncEndpoint)]
    close = difflib.get_close_matches(wanted, endpoints, 1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Its endpoints are: {', '.join(endpoints)}" if endpoints else "It holds no Endpoint object"
