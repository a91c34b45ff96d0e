"""The metrics, the alert rules and the Grafana board with a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import not_installed, running
from tests.servers.postgresql import PostgresqlServer
from tests.servers.prometheus import PrometheusServer

from delayline import Endpoint, SqlDatabase, SqlDelayedMessageStore, SqlTransport
from delayline.telemetry import PrometheusMetrics, remembered
from delayline.telemetry.catalog import MESSAGING, NSERVICEBUS, OWN, Kind
from delayline.telemetry.http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from delayline import Message, MessageContext

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(?:delayline|messaging|nservicebus)_\w+(?=[\s{\[)]|$)")


def series_of_catalog() -> set[str]:
    """Return the name of every series that the documented metrics have."""
    names: set[str] = set()
    for metric in (*OWN, *MESSAGING, *NSERVICEBUS):
        ends = ("_bucket", "_count", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)
        names |= {metric.prometheus_name + end for end in ends}
    return names


def board_expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "delayline.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


@pytest.fixture(autouse=True)
def installed() -> None:
    if not PrometheusServer.installed():
        not_installed(PrometheusServer.product, PrometheusServer.install)


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[PrometheusServer]:
    """Provide a Prometheus that scrapes an endpoint which has delayed, handled, retried and given up messages."""
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    failures, ended = iter([KeyError("no such order")]), asyncio.Semaphore(0)

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        for failure in failures:
            raise failure
        ended.release()

    metrics = PrometheusMetrics(nservicebus=True)
    metrics.watch(endpoint)
    with HttpServer("127.0.0.1:0", {"/metrics": metrics.respond}) as server:
        prometheus = await asyncio.to_thread(PrometheusServer, server.address)
        try:
            async with endpoint, asyncio.timeout(30):
                await endpoint.send("shop", "now")
                await endpoint.send("shop", "later", delay=timedelta(milliseconds=200))
                await endpoint.send("nowhere", "lost", delay=timedelta(milliseconds=200), check_destination=False)
                await endpoint.send("shop", "next week", delay=timedelta(days=7))
                await ended.acquire()
                await ended.acquire()
                yield prometheus
        finally:
            await asyncio.to_thread(prometheus.stop)


async def eventually_found(prometheus: PrometheusServer, expression: str) -> list[dict[str, Any]]:
    """Return the series of an expression once it has some."""
    async with asyncio.timeout(20):
        while True:
            found: list[dict[str, Any]]
            found = (await asyncio.to_thread(prometheus.ask, "query", query=expression))["result"]
            if found:
                return found
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_a_real_prometheus_finds_every_documented_name(scraped: PrometheusServer) -> None:
    """Given a scraped endpoint, then every metric is there with its type, and the values are right."""
    [sample] = await eventually_found(scraped, 'delayline_errors_queued_total{delayline_endpoint="shop"} > 0')
    assert sample["metric"]["messaging_destination_name"] == "nowhere"
    [handled] = await eventually_found(scraped, 'delayline_handler_attempts_total{error_type=""} == 2')
    assert handled["metric"]["instance"]
    [late] = await eventually_found(scraped, "delayline_delivery_lateness_seconds_count == 1")
    assert late["metric"]["messaging_destination_name"] == "shop"
    pending = await eventually_found(scraped, "delayline_messages_pending > 0")
    assert [one["metric"]["delayline_due"] for one in pending] == ["later"]
    described = await asyncio.to_thread(scraped.ask, "metadata")
    for metric in (*OWN, *MESSAGING, *NSERVICEBUS):
        [entry] = described[metric.prometheus_name.removesuffix("_total")]  # as OpenMetrics describes counters
        assert (entry["type"], entry["help"]) == (metric.kind.value, metric.meaning)


@pytest.mark.slow
async def test_every_query_of_the_board_and_of_the_alerts_is_understood(scraped: PrometheusServer) -> None:
    await eventually_found(scraped, "delayline_handlers_running")
    for expression in board_expressions():
        query = expression.replace("$__rate_interval", "1m").replace("$endpoint", ".*")
        await asyncio.to_thread(scraped.ask, "query", query=query)
    [group] = (await asyncio.to_thread(scraped.ask, "rules"))["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(group["rules"]) == 18


def test_board_and_alerts_use_documented_metrics_only() -> None:
    used = set()
    for text in (*board_expressions(), *expressions_of_rules()):
        used |= set(METRIC.findall(re.sub(r"\{[^}]*\}", "{", text)))
    used -= {"delayline_endpoint", "delayline_due", "delayline_retry", "delayline_breaker", "delayline_queue_role"}
    used -= {"messaging_destination_name", "messaging_operation_name"}
    assert used
    assert used <= series_of_catalog()


def expressions_of_rules() -> Iterator[str]:
    """Yield the expressions of the alert rules."""
    text = (DEPLOY / "prometheus" / "delayline-alerts.yml").read_text()
    yield from re.findall(r"expr: (?:>-\n)?((?:.|\n {10})*)", text)


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "delayline-alerts.yml"),
        ("test", "rules", "delayline-alerts.test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_rules_and_the_example(command: tuple[str, ...]) -> None:
    promtool(*command)


def test_promtool_finds_no_fault_in_the_metrics() -> None:
    promtool("check", "metrics", given=PrometheusMetrics(nservicebus=True).text()[0])


def promtool(*arguments: str, given: str = "") -> None:
    """Run promtool beside the rules, and let the test fail as it does."""
    done = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY / "prometheus", input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.server
async def test_a_scrape_during_a_database_outage_returns_the_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given pending messages that were counted, when their server is killed, then a scrape still has them, quickly."""
    pending = (
        'delayline_messages_pending{delayline_due="1d",delayline_endpoint="shop",messaging_system="delayline"} 1.0'
    )
    with running(PostgresqlServer, "fsync=off") as server:
        database = SqlDatabase(server.new_database(), server_timeout=2)
        store, transport = SqlDelayedMessageStore(database), SqlTransport(database)
        endpoint = Endpoint("shop", transport=transport, delayed_delivery=store)
        metrics = PrometheusMetrics()
        metrics.watch(endpoint)
        async with endpoint:
            await endpoint.send("shop", "x", delay=timedelta(hours=2))
            assert pending in (await asyncio.to_thread(metrics.text))[0]
            await asyncio.to_thread(server.kill)
            monkeypatch.setattr(remembered, "USABLE_FOR", 0.0)
            monkeypatch.setattr(remembered, "USABLE_FOR_SHARES", 0.0)
            began = time.monotonic()
            found = (await asyncio.to_thread(metrics.text))[0]
            assert time.monotonic() - began < 5
            assert pending in found
            await asyncio.to_thread(server.start)
