"""Makes the pictures of the documentation: `python -m tests.dashboard.pictures`, with Chromium installed.

Their endpoint has 80 000 messages that wait in a database, some thousand in a cold tier, and a day of minute rows with
two busy hours and a backlog.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.dashboard.browser import Browser, serving
from tests.dashboard.world import ENDPOINT, failures, late, minute_row, remember
from tests.integration.cold_rows import hold

from delayline import DelayedMessage, Headers, Message
from delayline.bulk import TwoTierStore
from delayline.cli.connection import table_groups
from delayline.composition import endpoint_from, set_up_features
from delayline.opening import open_pending
from delayline.settings import Settings
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delayline.telemetry.history import MinuteRow

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
#: Shares of the destinations, whose colours are given in this order.
SHARES: Final = {"billing": 40, "email": 45, "audit": 15}
WIDTH: Final = 1280
HEIGHTS: Final = {"now": 690, "forecast": 560}


async def filled(folder: Path) -> Settings:
    """Return the settings of the endpoint, set up and filled."""
    settings = Settings(endpoint=ENDPOINT, url=f"sqlite:///{folder / 'sales.db'}", cold_tier=str(folder / "cold"))
    await set_up_features(settings, list(table_groups().values()))
    endpoint = endpoint_from(settings, polling=False)
    async with endpoint:
        await endpoint.transport.setup_infrastructure([*SHARES, settings.error_queue])
        failed = [TransportOperation(message, settings.error_queue) for message in failures(hostile=False)]
        await endpoint.transport.dispatch(failed[:4])
    now = datetime.now(UTC)
    async with open_pending(settings) as store:
        assert isinstance(store, TwoTierStore)
        await store.store_many(list(waiting(now)))
        for day in range(20, 120):
            due = now + timedelta(days=day)
            cold = [(f"renewal-{day}-{number}", due + timedelta(seconds=number)) for number in range(day)]
            await hold(store, *cold, destination="email")
    await remember(settings.resolved_store_url, [row for back in range(1, 24 * 60) for row in rows(now, back)])
    return settings


def waiting(now: datetime) -> Iterator[DelayedMessage]:
    """Yield messages due from two minutes to years ahead, and a campaign that is due in 20 to 30 minutes."""
    chance = random.Random(41)  # noqa: S311 - the same picture each time
    for number in range(80_000):
        seconds = chance.uniform(1210, 1790) if number % 8 < 3 else 100 * math.exp(abs(chance.gauss(6.5, 2.6)))
        [destination] = chance.choices(list(SHARES), list(SHARES.values())) if number % 8 > 2 else ["email"]
        order = json.dumps({"order": number}).encode()
        message = Message(f"order-{number}", {Headers.ENCLOSED_MESSAGE_TYPES: "shop.Reminder"}, order)
        yield DelayedMessage(message, destination, now + timedelta(seconds=min(seconds, 60_000_000)))


def rows(now: datetime, back: int) -> Iterator[MinuteRow]:
    """Yield the rows of two processes in a minute, one of which stopped two hours ago for ten minutes."""
    chance = random.Random(back)  # noqa: S311
    for process, share in (("web-1:4711:a1b2c3", 0.6), ("web-2:4711:d4e5f6", 0.4)):
        if share < 0.5 and 120 < back < 130:
            continue
        wave = 500 + 300 * math.sin(back / 230) + 500 * math.exp(-(((back - 300) / 45) ** 2))
        backlog = 95 < back < 118
        number = round((2400 if backlog else wave * chance.uniform(0.9, 1.1)) * share)
        lateness = {name: late(430 if backlog else back, number * part // 100) for name, part in SHARES.items()}
        failed = chance.choice((0, 0, 1, 4)) if back > 30 else 0
        row = minute_row(back, now=now, dispatched=number)
        yield replace(row, process=process, handled=number - failed, failed=failed, lateness=lateness, breakers={})


def main() -> None:
    """Write the pictures, each in light and dark."""
    with tempfile.TemporaryDirectory() as place:
        settings = asyncio.run(filled(Path(place)))
        browser = Browser(Path(place) / "profile")
        try:
            with serving([settings]) as url:
                browser.url = url
                for page, path in (("now", "/"), ("forecast", "/forecast")):
                    for theme in ("light", "dark"):
                        browser.emulate(theme, WIDTH)
                        browser.open(path)
                        if page == "now":
                            browser.at_chart(0.5)
                        size = {"width": WIDTH, "height": HEIGHTS[page], "deviceScaleFactor": 1.25, "mobile": False}
                        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                        browser.driver.save_screenshot(str(IMAGES / f"dashboard-{page}-{theme}.png"))
        finally:
            browser.close()


if __name__ == "__main__":
    main()
