"""Conversion of Celery tasks to messages, and tasks that cannot be converted."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from delayline.migration.sources.celery_tasks import NoMessage, due_of, queue_in, task_of

ETA = "2031-05-06T07:08:09.123456+02:00"
BODY = [["Größe"], {"n": 1}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
FIELDS: dict[str, Any] = {
    "lang": "py", "task": "shop.remind", "id": "t-1", "eta": ETA, "expires": None, "retries": 2, "timelimit": [None, 5],
    "root_id": "r-1", "stamps": {}, "x-death": [{"count": 1}],
}  # fmt: skip


def test_headers_are_kept_and_the_eta_is_when_it_is_due() -> None:
    task = task_of(FIELDS, "application/json", json.dumps(BODY).encode())
    assert (task.id, task.due) == ("t-1", datetime(2031, 5, 6, 5, 8, 9, 123456, tzinfo=UTC))
    assert json.loads(task.headers) == {
        "NServiceBus.MessageId": "t-1", "NServiceBus.ContentType": "application/json", "Celery.Lang": "py",
        "Celery.Task": "shop.remind", "Celery.Id": "t-1", "Celery.Eta": ETA, "Celery.Retries": "2",
        "Celery.Timelimit": "[null, 5]", "Celery.RootId": "r-1", "Celery.Stamps": "{}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "content_type", "body", "why"),
    [
        ({"task": None}, "application/json", BODY, "not a task of Celery's protocol 2"),
        ({"id": ""}, "application/json", BODY, "not a task of Celery's protocol 2"),
        ({"expires": ETA}, "application/json", BODY, "it expires at '2031-05-06"),
        ({"compression": "application/x-gzip"}, "application/json", BODY, "its body is compressed"),
        ({}, "application/x-python-serialize", BODY, "its arguments are application/x-python-serialize, no JSON"),
        ({}, None, BODY, "its arguments are of no known type"),
        ({}, "application/json", {"task": "shop.remind"}, "none of Celery's protocol 2"),
        ({}, "application/json", [[], {}], "none of Celery's protocol 2"),
        ({}, "application/json", [[], {}, {"chain": [1], "chord": {"a": 1}}], "goes on with its chain and chord"),
        ({"eta": None}, "application/json", BODY, "it has no eta"),
        ({"eta": "2031-05-06T07:08:09"}, "application/json", BODY, "has no zone"),
        ({"eta": "tomorrow"}, "application/json", BODY, "is not a time"),
        ({"eta": 5}, "application/json", BODY, "is not a time"),
    ],
)
def test_tasks_that_are_not_messages_have_a_reason(
    fields: dict[str, Any], content_type: str | None, body: object, why: str
) -> None:
    with pytest.raises(NoMessage, match=why):
        task_of({**FIELDS, **fields}, content_type, json.dumps(body).encode())


def test_a_body_that_is_not_json_is_reported() -> None:
    with pytest.raises(NoMessage, match="its body is not JSON"):
        task_of(FIELDS, "application/json", b"\x80\x04")


def test_a_time_at_the_edge_of_the_years_is_none() -> None:
    with pytest.raises(NoMessage, match="is not a time"):
        due_of("0001-01-01T00:00:00+02:00")


def test_bits_of_delays_are_no_part_of_a_queue() -> None:
    bits = "0." * 27 + "1."
    assert queue_in("sales.orders") == "sales.orders"
    assert queue_in(f"{bits}sales") == "sales"
    assert queue_in(f"{bits}{bits}sales") == "sales"
    with pytest.raises(NoMessage, match="more than 28 bits"):
        queue_in(f"1.{bits}sales")
