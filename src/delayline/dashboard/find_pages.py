"""The page that finds messages, wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.responses import HTMLResponse

from delayline.dashboard.back_ends import unavailable
from delayline.dashboard.frame import PAGE_ROWS, Common, Frame, id_asked, offset_asked
from delayline.errors import DelaylineError
from delayline.filters import MessageFilter, literal
from delayline.places import PlaceKind
from delayline.searching import LONGEST_POSITION, SearchPosition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

LONGEST_WHERE: Final = 2_000
"""Characters of a filter in the form."""


class FindPages(Frame):
    """The page that finds messages, and what it shows as the search goes on, by path."""

    def __init__(self, common: Common) -> None:
        super().__init__(common)
        self.shown: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/find": self.find,
            "/find/more": self.more,
        }

    async def find(self, request: Request) -> Response:
        """Show the form, and what a search finds in a moment."""
        service = self._service(request)
        context = await self._found(request)
        return self._page(
            request, "find.html", "/find", service, kinds=list(PlaceKind), longest=LONGEST_WHERE, **context
        )

    async def more(self, request: Request) -> Response:
        """Send what a search finds as it goes on."""
        context = await self._found(request)
        return HTMLResponse(
            self._fragment(
                request,
                "find_more.html",
                endpoint=self._service(request).name,
                endpoints=list(self._services),
                **context,
            )
        )

    async def _found(self, request: Request) -> dict[str, Any]:
        """Return what the templates need of a search."""
        service, query = self._service(request), request.query_params
        fields = {
            "id": id_asked(query),
            "where": query.get("where", "").strip()[:LONGEST_WHERE],
            "in": query.get("in", "")[:100],
        }
        found = min(offset_asked(request), PAGE_ROWS - 1)
        context: dict[str, Any] = {"fields": fields, "found": found, "results": None, "rows": PAGE_ROWS}
        try:
            position = SearchPosition.parse(written) if (written := query.get("from", "")[:LONGEST_POSITION]) else None
            wanted = self._wanted(fields)
            if position is None and wanted.names_nothing:
                return context
            kinds = tuple(kind for kind in PlaceKind if fields["in"] in {"", kind.value})
            page = await service.find.page(wanted, kinds or tuple(PlaceKind), position, PAGE_ROWS - found)
        except DelaylineError as error:
            return context | {"results": unavailable(error)}
        return context | {"results": page, "wanted": str(wanted if position is None else position.filter)}

    def _wanted(self, fields: Mapping[str, str]) -> MessageFilter:
        """Return the filter of the form. Raises ConfigurationError."""
        by_id = str(MessageFilter(message_id=literal(fields["id"]))) if fields["id"] else ""
        return MessageFilter.parse([by_id, fields["where"]], self._clock.now())
