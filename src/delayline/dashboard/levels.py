"""Messages that wait in a back end's own delay levels: they are counted, and when they are due has bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.backends import SupportsNativeCount, backend_of, due_by
from delayline.composition import delays_url
from delayline.dashboard.back_ends import PageQueries, within_limit
from delayline.dashboard.live import Shared
from delayline.dashboard.model import LevelForecast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from delayline.backends import DueWithin
    from delayline.dashboard.back_ends import BackEnds

#: Seconds for which counts are shown again: each is a question per level.
COUNTS_KEPT: Final = 1.0


class DelayLevels(PageQueries):
    """The delay levels of an endpoint's back end, which has them beside its store or instead of it."""

    def __init__(self, back_ends: BackEnds) -> None:
        super().__init__(back_ends)
        settings, delivery = back_ends.settings, back_ends.delivery
        self._url = None if settings is None else delays_url(settings)
        counts: object = delivery
        self._delivery = counts if isinstance(counts, SupportsNativeCount) else None
        without_store = delivery is not None and delivery.store is None
        self.alone: bool = without_store if settings is None else self._url == settings.resolved_store_url
        """Whether delayed messages wait in levels only."""
        self._counts = Shared(self._counted, COUNTS_KEPT, back_ends.clock)

    @within_limit
    async def forecast(self, *spans: timedelta) -> LevelForecast | None:
        """Return how many messages are due within each span; None where no message waits in levels.

        Args:
            spans: Times from now, ascending.
        """
        levels = await self._counts()
        if not levels:
            return None
        return LevelForecast(sum(level.count for level in levels), levels, due_by(levels, spans))

    async def _counted(self) -> Sequence[DueWithin]:
        if self._delivery is not None:
            return await self._delivery.count_pending()
        return () if self._url is None else await backend_of(self._url).count_pending(self._url)
