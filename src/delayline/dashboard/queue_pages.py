"""The page of the queues and their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from delayline.dashboard.forms import whole
from delayline.dashboard.frame import Common, Frame
from delayline.dashboard.model import Unavailable
from delayline.errors import InvalidMessage
from delayline.message import MAXIMUM_DESTINATION_LENGTH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

MOST_AT_ONCE: Final = 10_000
LONGEST_TYPE: Final = 300
"""Characters of a type's name in the form."""


class QueuePages(Frame):
    """The page of the queues, and the action on their limits, by path."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.shown: Mapping[str, Callable[[Request], Awaitable[Response]]] = {"/queues": self.queues}
        self.actions: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/queues": self._action(self.change, "/queues")
        }

    async def queues(self, request: Request) -> Response:
        """Show all queues with their limits, and a form to change those of one."""
        service = self._service(request)
        name = request.query_params.get("queue", "")[:MAXIMUM_DESTINATION_LENGTH]
        queues = await service.queues.all()
        chosen = None
        if not isinstance(queues, Unavailable):
            chosen = next((queue for queue in queues if queue.limits.queue == name), None)
        context = {"queues": queues, "asked": name, "chosen": chosen, "error_queue": service.back_ends.error_queue}
        return self._page(request, "queues.html", "/queues", service, **context)

    async def change(self, request: Request) -> Response:
        """Change those limits of a queue that the form has otherwise than it was shown."""
        service, form, actor = self._service(request), request.state.form, request.state.actor.name
        queue, changes = form.get("queue", ""), _changes(form)
        if not changes:
            raise InvalidMessage("nothing was changed in the form")
        outcome = await service.queues.change(queue, changes, actor=actor)
        return self._outcome(request, [outcome], "/queues", service, queue=queue)


def _changes(form: Mapping[str, str]) -> dict[str, Any]:
    """Return what differs from what the form had: a limit that another person has changed meanwhile stays."""
    changes: dict[str, Any] = {}
    if (paused := form.get("paused", "")) in {"yes", "no"} and paused != form.get("was_paused"):
        changes["paused"] = paused == "yes"
    if (written := form.get("concurrency", "").strip()) != form.get("was_concurrency", ""):
        changes["concurrency"] = whole(written, "the number at once", MOST_AT_ONCE) if written else None
    if (written := form.get("rate", "").strip()) != form.get("was_rate", ""):
        changes["rate"] = _rate(written) if written else None
    if kind := form.get("type", "").strip()[:LONGEST_TYPE]:
        written = form.get("type_concurrency", "").strip()
        number = whole(written, f"the number of {kind} at once", MOST_AT_ONCE) if written else None
        changes["handlers"] = {kind: number}
    return changes


def _rate(written: str) -> float:
    try:
        return float(written)
    except ValueError as error:
        raise InvalidMessage(f"a rate is a number of messages a second, not {written[:20]!r}") from error
