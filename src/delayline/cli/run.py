"""`delayline run`: run an endpoint until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.due import delay_given
from delayline.cli.log_format import LogOnStderr, log_options
from delayline.cli.options import COMMAND_LINE, EXIT_FAILED, examples, json_option, settings_options
from delayline.cli.screen import Screen
from delayline.cli.target import load_endpoint, refuse_ignored
from delayline.cli.workers import (
    Supervisor,
    Worker,
    WorkersProbes,
    answer_supervisor,
    delayline_command,
    workers_metrics,
)
from delayline.composition import endpoint_from
from delayline.opening import refuse_memory
from delayline.running import checked_endpoints, run_until_stopped
from delayline.settings import DEFAULT_URL, Settings, flag_of, given_on_command_line
from delayline.telemetry.http_server import HttpServer
from delayline.telemetry.measurements import Measurements
from delayline.telemetry.probes import Probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from delayline.endpoint import Endpoint
    from delayline.telemetry.http_server import Response


@click.command(
    epilog=examples(
        "delayline run shop.billing:endpoint",
        "delayline run shop.billing:endpoint --grace 2m --log-format json",
        "delayline run shop.billing:endpoint --metrics 127.0.0.1:9464",
        "delayline run shop.billing:endpoint --health 127.0.0.1:8081",
        "delayline run shop.billing:endpoint shop.orders:endpoint --health 127.0.0.1:8081",
        "delayline run shop.billing:endpoint --processes 4 --health 127.0.0.1:8081",
        "delayline run shop.billing:endpoint --reload",
        "delayline run --endpoint sales   (dispatches due messages, handles none)",
    )
)
@click.argument("targets", nargs=-1, metavar="[MODULE:ENDPOINT]...")
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
@click.option("--processes", type=click.IntRange(1, 1000), default=1, show_default=True, help="Worker processes.")
@click.option("--reload", is_flag=True, help="Start again when a .py or .toml file below this directory changes.")
@click.option("--worker", type=int, hidden=True, help="The pipe to the process that supervises this one.")
@log_options
@settings_options()
@json_option
def run(  # noqa: PLR0913 - the options of the command
    settings: Settings,
    screen: Screen,
    targets: tuple[str, ...],
    log: LogOnStderr,
    grace: timedelta,
    log_handled: bool,
    metrics: str | None,
    nservicebus_metrics: bool,
    opentelemetry: bool,
    health: str | None,
    heartbeat: Path | None,
    processes: int,
    reload: bool,
    worker: int | None,
) -> None:
    """Run Endpoint objects of modules, found from the current directory, until SIGINT or SIGTERM.

    It then finishes messages in flight within the grace period; the messages of handlers that take longer are handled
    again. A second signal ends it at once. With --processes, a process that dies is started again, after 1 second, then
    2, up to 30; probes and metrics are those of all. Without a module it runs the endpoint of the settings, which only
    dispatches due messages. Exit code 1 when a critical error stopped it. Under systemd it reports its start, its stop
    and, with WatchdogSec, each turn of its event loop.
    """
    if worker is None and (processes > 1 or reload):
        workers = [Worker(number + 1, _worker_command(grace), quiet=screen.as_json) for number in range(processes)]
        supervised = WorkersProbes(workers, heartbeat=heartbeat)
        exposed = workers_metrics(workers) if _has_metrics(health, metrics) else None
        with _serving(screen, supervised, exposed, health, metrics):
            supervisor = asyncio.run(_supervise(workers, supervised, screen, grace, reload=reload))
        stopped_by = supervisor.stopped_by
        screen.echo(f"{processes} processes stopped")
        screen.document({"targets": targets, "processes": processes, "stopped_by": stopped_by})
        click.get_current_context().exit(supervisor.exit_code)
    endpoints = _endpoints(settings, targets)
    named = endpoints[0].name if len(endpoints) == 1 else None
    log.keep(named, handled=log_handled)
    if opentelemetry:
        _opentelemetry(endpoints)
    probes = Probes(*map(Measurements.of, endpoints), heartbeat=heartbeat)
    exposed = None
    if _has_metrics(health, metrics) or (worker is not None and METRICS_INSTALLED):
        exposed = _metrics(endpoints, nservicebus=nservicebus_metrics)
    if worker is not None:
        answer_supervisor(worker, dict(probes.routes()) | ({} if exposed is None else {"/metrics": exposed}))
    with _serving(screen, probes, exposed, health, metrics):
        stopped_by = asyncio.run(_run(endpoints, probes, screen, grace))
    names = [endpoint.name for endpoint in endpoints]
    screen.echo(f"{', '.join(names)} stopped{'' if stopped_by else ' by itself'}")
    screen.document({"endpoints": names, "stopped_by": stopped_by})
    if stopped_by is None:
        which = f"endpoint {names[0]!r}" if len(names) == 1 else f"one of the endpoints {', '.join(names)}"
        Screen.complain(f"{which} stopped after a critical error; see the log above")
        click.get_current_context().exit(EXIT_FAILED)


def _endpoints(settings: Settings, targets: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints of the modules, or the one of the settings. Raises ConfigurationError."""
    if not targets:
        refuse_memory(settings)
        return [endpoint_from(settings)]
    command_line = click.get_current_context().meta[COMMAND_LINE]
    with given_on_command_line(command_line):
        endpoints = checked_endpoints([load_endpoint(target) for target in targets])
    for endpoint in endpoints:
        refuse_ignored(endpoint, command_line)
    return endpoints


METRICS_INSTALLED: Final = importlib.util.find_spec("prometheus_client") is not None


def _has_metrics(health: str | None, metrics: str | None) -> bool:
    """Return whether metrics are served: on request, and beside probes if they can be."""
    return metrics is not None or (health is not None and METRICS_INSTALLED)


def _metrics(endpoints: Sequence[Endpoint], *, nservicebus: bool) -> Callable[[str], Response]:
    from delayline.telemetry.prometheus import PrometheusMetrics  # an extra

    exposed = PrometheusMetrics(nservicebus=nservicebus)
    for endpoint in endpoints:
        exposed.watch(endpoint)
    return exposed.respond


@contextlib.contextmanager
def _serving(
    screen: Screen,
    probes: Probes,
    exposed: Callable[[str], Response] | None,
    health: str | None,
    metrics: str | None,
) -> Iterator[None]:
    """Serve probes and metrics at the addresses that are asked for; the server of the probes serves the metrics too."""
    wanted: dict[str, dict[str, Callable[[str], Response]]] = {}
    if health is not None:
        wanted[health] = dict(probes.routes())
    if exposed is not None:
        for address in {health, metrics} - {None}:
            wanted.setdefault(str(address), {})["/metrics"] = exposed
    with contextlib.ExitStack() as serving:
        for address, paths in wanted.items():
            server = serving.enter_context(HttpServer(address, paths))
            screen.echo(f"serves {', '.join(f'http://{server.address}{path}' for path in server.paths)}")
        yield


def _worker_command(grace: timedelta) -> list[str]:
    """Return the command line of a worker: that of this command, without what the supervisor does."""
    context = click.get_current_context()
    params, given = context.params, context.meta[COMMAND_LINE]
    words = [*delayline_command(), "run", *params["targets"], f"--grace={grace.total_seconds() * 1000:.0f}ms"]
    words += [f"--log-level={params['log_level']}", f"--log-format={params['log_format']}"]
    flags = ("verbose", "log_handled", "nservicebus_metrics", "opentelemetry")
    words += [flag_of(name) for name in flags if params[name]]
    words += [] if given.config is None else [f"--config={given.config}"]
    return words + [f"{flag_of(name)}={value}" for name, value in given.flags.items() if value is not None]


async def _supervise(
    workers: Sequence[Worker], probes: WorkersProbes, screen: Screen, grace: timedelta, *, reload: bool
) -> Supervisor:
    def started() -> None:
        text = f"{len(workers)} process{'' if len(workers) == 1 else 'es'} run. Ctrl+C stops them"
        screen.echo(text)
        probes.started(text)

    supervisor = Supervisor(workers, grace=grace, sources=Path.cwd() if reload else None)
    async with probes:
        await supervisor.run(probes, started)
    return supervisor


def _opentelemetry(endpoints: Sequence[Endpoint]) -> None:
    from delayline.telemetry.opentelemetry import OpenTelemetry  # an extra

    observed = OpenTelemetry()
    for endpoint in endpoints:
        observed.watch(endpoint)


async def _run(endpoints: Sequence[Endpoint], probes: Probes, screen: Screen, grace: timedelta) -> str | None:
    def started() -> None:
        lines = [_started(endpoint) for endpoint in endpoints]
        for line in lines:
            screen.echo(line)
        probes.started(" ".join(lines))

    async with probes:
        return await run_until_stopped(*endpoints, started=started, grace=grace, stopping=probes.stopping)


def _started(endpoint: Endpoint) -> str:
    handlers = f"{len(endpoint.handlers)} handler{'' if len(endpoint.handlers) == 1 else 's'}"
    runs = f"{endpoint.name} runs: {endpoint.transaction_mode.name}, {endpoint.guarantee}, {handlers}."
    settings = endpoint.made_from
    if isinstance(settings, Settings) and DEFAULT_URL in (settings.resolved_transport_url, settings.resolved_store_url):
        runs += f" Its messages are in the local file {DEFAULT_URL.removeprefix('sqlite:///')}."
    return f"{runs} Ctrl+C stops it"
