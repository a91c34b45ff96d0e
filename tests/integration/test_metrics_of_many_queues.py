"""Metrics of an endpoint whose database has ten thousand queues."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event
from sqlalchemy.engine import Engine

from delayline import Endpoint, Message, SqlDelayedMessageStore, SqlTransport, StoredDelivery
from delayline.spi import TransportOperation
from delayline.telemetry import Measurements, remembered
from delayline.telemetry.prometheus import PrometheusMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUEUES = [f"queue-{number:05}" for number in range(10_000)]
#: Series of queues: those of destinations, and the endpoint's own.
MOST_SERIES = 202
#: Pending messages by due time, pauses, and states of queues: a few statements each, however many queues there are.
MOST_STATEMENTS = 20
MOST_BYTES = 16_000_000


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'queues.db'}"
    return str(request.getfixturevalue("postgresql_url"))


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """The statements of all databases, as they are run."""
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:  # noqa: ANN401 - SQLAlchemy's
        del connection, cursor, more
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


async def test_a_scrape_asks_a_few_questions_and_keeps_little(
    url: str, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given ten thousand queues with a message each, to all of which the endpoint has sent
    monkeypatch.setattr(remembered, "READER_PATIENCE", 60.0)
    transport = SqlTransport(url)
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=delivery, send_only=True)
    metrics = PrometheusMetrics()
    metrics.watch(endpoint)
    async with endpoint:
        await transport.setup_infrastructure(QUEUES)
        for first in range(0, len(QUEUES), 1000):
            some = QUEUES[first : first + 1000]
            await transport.dispatch([TransportOperation(Message(name, {}, b"x"), name) for name in some])
        for name in QUEUES:
            Measurements.of(endpoint).sent("send", [name], 0.1, None)
        # When the metrics are scraped
        statements.clear()
        tracemalloc.start()
        try:
            text, _ = await asyncio.to_thread(metrics.text)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        asked = list(statements)
    # Then some queues have series, each with its message
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    depths = [sample.value for sample in samples if sample.name == "delayline_queue_messages"]
    assert depths.count(1) >= 199
    assert len(depths) <= MOST_SERIES
    # And it took a few statements, none of which returns all queues, and little memory
    assert 0 < len(asked) <= MOST_STATEMENTS, asked
    assert peak < MOST_BYTES
