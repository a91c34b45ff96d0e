"""Job states of APScheduler are pickles from a stranger: what reading one may take is bounded."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest

from delayline.migration.sources.apscheduler import LARGEST_STATE, APScheduler

JOB: dict[str, Any] = {"func": "m:f", "name": "n", "executor": "default", "args": ("Größe",), "kwargs": {"n": 1}}


def message(state: bytes) -> tuple[Any, ...]:
    return APScheduler.__new__(APScheduler)._message("k", 1.79e9, state)


def pickled(**changed: object) -> bytes:
    trigger = b"capscheduler.triggers.date\nDateTrigger\n)\x81"  # an object of that class, without importing it
    pairs = b"".join(pickle.dumps(one, 2)[2:-1] for pair in (JOB | changed).items() for one in pair)
    return b"\x80\x02}(" + b"X\x07\x00\x00\x00trigger" + trigger + pairs + b"u."


def shared(depth: int) -> list[Any]:
    one: list[Any] = ["x" * 1000]
    for _ in range(depth):
        one = [one] * 8
    return one


def nested(depth: int) -> list[Any]:
    one: list[Any] = []
    for _ in range(depth):
        one = [one]
    return one


def test_a_job_becomes_a_message() -> None:
    _, executor, due, headers, body, reason = message(pickled())
    assert (executor, due, reason) == ("default", datetime.fromtimestamp(1.79e9, UTC), None)
    assert json.loads(headers)["APScheduler.Function"] == "m:f"
    assert json.loads(body) == {"args": ["Größe"], "kwargs": {"n": 1}}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (b"\x80\x04N" + b"r" + struct.pack("<I", 0x08000000) + b".", "more than it has bytes"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "cannot be read"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", "cannot be read"),
        (b"(p" + b"9" * 4500 + b"\n.", "cannot be read"),
        (b"cm\nC\n" * 2000 + b".", "more than 1000 classes"),
        (b"\x80\x04" + b"]" * LARGEST_STATE + b".", "bytes, 1,048,576 at most"),
        (pickle.dumps({"trigger": 1} | JOB | {"func": shared(12)}), "its func is not text"),
        (pickled(name="n" * 2000), "its name is not text"),
        (pickled(args=shared(12)), "they have more than 16 MiB"),
        (pickled(args=["x" * 100_000] * 1000), "they have more than 16 MiB"),
        (pickled(args=[float("nan")]), "its arguments are not JSON"),
        (pickled(args=["\ud800"]), "its arguments are not JSON"),
        (pickled(args=[10**5000]), "its arguments are not JSON"),
        (pickled(args=[object]), "its arguments are not JSON"),
    ],
    ids=range(14),
)
def test_a_hostile_job_state_takes_little_memory_and_becomes_no_message(state: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        *_, reason = message(state)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said in reason
    assert len(reason) < 700
    assert peak < 200 * 1024 * 1024


def test_arguments_nested_too_deep_become_no_message() -> None:
    state = b"\x80\x02}(" + b"".join(
        b"X" + struct.pack("<I", len(name)) + name + value
        for name, value in (
            (b"trigger", b"capscheduler.triggers.date\nDateTrigger\n)\x81"), (b"func", b"X\x01\0\0\0f"),
            (b"name", b"X\x01\0\0\0n"), (b"executor", b"X\x01\0\0\0e"), (b"kwargs", b"}"),
            (b"args", b"]" * 50_000 + b"a" * 49_999),
        )
    ) + b"u."  # fmt: skip
    assert "its arguments are not JSON" in message(state)[-1]


def test_a_job_that_repeats_stays_without_its_arguments_being_encoded() -> None:
    assert message(pickle.dumps({"trigger": 1} | JOB | {"args": shared(12)}))[-1].startswith("it repeats (int)")
