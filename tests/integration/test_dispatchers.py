"""The rows that let dispatchers continue, stop them, or show that another one has taken over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from delayline import SqlDelayedMessageStore
from delayline.bulk.dispatchers import DispatcherControl, ShardMetrics
from delayline.errors import BackendUnusable

LEASE = timedelta(minutes=10)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> DispatcherControl:
    name = request.param
    url = f"sqlite:///{tmp_path / 'house.db'}" if name == "sqlite" else request.getfixturevalue(f"{name}_url")
    asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure("sales"))
    control = DispatcherControl(url)
    control.create()
    return control


def test_a_generation_goes_on_until_the_next_one(control: DispatcherControl) -> None:
    control.begin("sales", "a")
    first = control.next_generation("sales", "a", LEASE)
    assert first is not None and control.goes_on(first)
    second = control.next_generation("sales", "a", LEASE)
    assert second is not None and second.number == first.number + 1
    assert control.goes_on(second) and not control.goes_on(first)


def test_who_begins_takes_over(control: DispatcherControl) -> None:
    control.begin("sales", "a")
    generation = control.next_generation("sales", "a", LEASE)
    control.begin("sales", "b")
    assert generation is not None and not control.goes_on(generation)
    assert control.next_generation("sales", "a", LEASE) is None
    assert control.next_generation("sales", "b", LEASE) is not None


def test_a_stopped_dispatcher_stops_until_it_is_started_again(control: DispatcherControl) -> None:
    control.begin("sales", "a")
    generation = control.next_generation("sales", "a", LEASE)
    assert control.stop("sales") and control.stop("sales")
    assert (
        generation is not None
        and not control.goes_on(generation)
        and control.next_generation("sales", "a", LEASE) is None
    )
    assert not control.stop("purchases")
    control.begin("sales", "a")
    assert control.next_generation("sales", "a", LEASE) is not None


def test_a_lease_that_is_over_ends_the_wave(control: DispatcherControl) -> None:
    control.begin("sales", "a")
    generation = control.next_generation("sales", "a", timedelta(seconds=-5))
    assert generation is not None and not control.goes_on(generation)


def test_the_last_output_of_each_shard_is_logged(control: DispatcherControl) -> None:
    metrics = ShardMetrics(0, 1, "host 17", 10, 1, 0, 0.014, 0.03, 0.2)
    control.record_metrics("sales", metrics)
    control.record_metrics("sales", replace(metrics, dispatched=20, p50=None))
    control.record_metrics("sales", replace(metrics, shard=1))
    control.record_metrics("purchases", replace(metrics, shard=7))
    first, second = control.shards("sales")
    assert (first.dispatched, first.p50, second.shard, second.dispatched) == (20, None, 1, 10)
    assert first.seen is not None and first.seen.utcoffset() == timedelta(0)


def test_stop_without_any_dispatcher_is_an_error(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'house.db'}"
    asyncio.run(SqlDelayedMessageStore(url).setup_infrastructure("sales"))
    with pytest.raises(BackendUnusable, match="no dispatcher has ever run"):
        DispatcherControl(url).stop("sales")
