"""`delayline run`: run an endpoint until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delayline.cli.due import delay_given
from delayline.cli.log_format import LOG_FORMATS, LOG_LEVELS, log_to_stderr
from delayline.cli.options import COMMAND_LINE, EXIT_FAILED, examples, json_option, settings_options
from delayline.cli.screen import Screen
from delayline.cli.target import load_endpoint, refuse_ignored
from delayline.composition import endpoint_from
from delayline.endpoint import GRACE
from delayline.opening import refuse_memory
from delayline.settings import DEFAULT_URL, Settings, given_on_command_line
from delayline.telemetry.http_server import HttpServer
from delayline.telemetry.measurements import Measurements
from delayline.telemetry.probes import Probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from delayline.endpoint import Endpoint
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
        command_line = click.get_current_context().meta[COMMAND_LINE]
        with given_on_command_line(command_line):
            endpoint = load_endpoint(target)
        refuse_ignored(endpoint, command_line)
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
    runs = f"{endpoint.name} runs: {endpoint.transaction_mode.name}, {endpoint.guarantee}, {handlers}."
    settings = endpoint.made_from
    if isinstance(settings, Settings) and DEFAULT_URL in (settings.resolved_transport_url, settings.resolved_store_url):
        runs += f" Its messages are in the local file {DEFAULT_URL.removeprefix('sqlite:///')}."
    return f"{runs} Ctrl+C stops it"
