"""Celery's ETA tasks that workers hold, from the output of `celery inspect scheduled --json`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from delayline.bulk.writer import blocking
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.migration.collected import ROWS_A_PAGE, UNSURE, CollectedMessage, Selection, key_of
from delayline.migration.sources.celery_tasks import FOLLOWERS, JSON_TYPE, NoMessage, queue_in, task_of
from delayline.migration.sources.exported import ExportedFiles
from delayline.migration.tally import Bounds, Tally

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTHING_FOLLOWS: Final = dict.fromkeys(FOLLOWERS)


class CeleryScheduled(ExportedFiles):
    """Tasks in export files. Workers hold them too, until they are revoked: `verify` reports each as in doubt.

    The named endpoint owns the store that receives the messages.
    """

    kind: ClassVar[str] = "celery-scheduled"
    written_by: ClassVar[str] = "Celery"

    async def drain(self, which: Selection, spark: SparkSession) -> None:
        """Copy the tasks into the table beside the journal; workers hold no more of them than they prefetch."""
        del spark
        moved = await self.database.read(self.moved)
        tasks = [task for task in self._tasks(which) if which.includes(task.due)]
        for first in range(0, len(tasks), ROWS_A_PAGE):
            some = tasks[first : first + ROWS_A_PAGE]
            new = await self.database.read(partial(self.new, rows=some, moved=moved))
            await self.database.write(partial(self.keep, rows=new))

    def looked_at(self, which: Selection, bounds: Bounds, spark: SparkSession) -> Tally:
        """Count them."""
        del spark
        tally, tasks = Tally(), self._tasks(which)
        moved = blocking(self.database.look(self.moved))
        tally.add(blocking(self.database.look(partial(self.new, rows=tasks, moved=moved))), which, bounds)
        return tally

    def _tasks(self, which: Selection) -> list[CollectedMessage]:
        """Return the tasks, each once: a task that a worker has given back may be at another worker by now."""
        if which.endpoints is None or len(which.endpoints) != 1:
            raise ConfigurationError(
                "Celery's tasks belong to no endpoint: name with --endpoint the endpoint whose store receives them"
            )
        tasks = [
            _collected(entry, which.endpoints[0])
            for path in self.files
            for worker in _workers(path)
            for entry in worker
        ]
        return list({task.key: task for task in tasks}.values())


def _workers(path: str) -> list[list[dict[str, Any]]]:
    """Return each worker's answer. Raises BackendUnusable for a file that is not such an export."""
    why = "it is not an object with a list of tasks for each worker"
    try:
        answers = json.loads(Path(path).read_bytes())
        if isinstance(answers, dict) and all(isinstance(tasks, list) for tasks in answers.values()):
            workers = list(answers.values())
            if all(isinstance(entry, dict) for worker in workers for entry in worker):
                return workers
    except OSError as error:
        raise BackendUnusable(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise BackendUnusable(f"{path} is not the output of `celery inspect scheduled --json`: {why}")


def _collected(entry: dict[str, Any], endpoint: str) -> CollectedMessage:
    """Return a task as it is kept; its body is made as Celery makes it."""
    given = entry.get("request")
    request: dict[str, Any] = given if isinstance(given, dict) else {}
    delivery = request.get("delivery_info")
    routing_key = delivery.get("routing_key") if isinstance(delivery, dict) else None
    name = str(request.get("id") or "") or None
    args, kwargs = request.get("args"), request.get("kwargs")
    try:
        body = json.dumps([args, kwargs, NOTHING_FOLLOWS], ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError):  # nested too deep: rejected below for its empty body
        body = b""
    fields = {"task": request.get("type") or request.get("name"), "id": name, "eta": entry.get("eta")}
    key, destination = key_of(name or json.dumps(entry, sort_keys=True)), None
    try:
        destination = queue_in(routing_key) if isinstance(routing_key, str) else None
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise NoMessage("its arguments were exported as text, no JSON: let Celery run it")  # noqa: TRY301
        task = task_of(fields, JSON_TYPE, body)
    except NoMessage as error:
        return CollectedMessage(key, endpoint, name, destination, None, None, body, str(error), state=UNSURE)
    return CollectedMessage(key, endpoint, name, destination, task.due, task.headers, body, state=UNSURE)
