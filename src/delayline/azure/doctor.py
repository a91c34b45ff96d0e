"""The checks of `delayline doctor` on a storage account: its three services, and the clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from delayline.azure.account import AzureAccount
from delayline.azure.delayed_table import AzureDelayedTable
from delayline.azure.requests import Requests
from delayline.errors import DelaylineError
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Sequence

Finding = tuple[str, bool, str]

#: More than a slow answer explains.
CLOCKS_DIFFER: Final = timedelta(seconds=10)


async def examine(url: str, *, endpoint: str | None = None) -> Sequence[Finding]:
    """Return findings: the services, this machine's clock, which decides whether a message is due, and the index.

    Args:
        url: The account's URL.
        endpoint: The endpoint whose table is looked at; None for none.
    """
    account = AzureAccount(url)
    dates: list[datetime] = []
    await account.open()
    try:
        clients = account.clients
        requests = Requests(account.server_timeout)
        asked: dict[str, Any] = {"results_per_page": 1, "raw_response_hook": _dates_into(dates)}
        return [
            await _look(requests, "queues", clients.queues.list_queues(**asked)),
            await _look(requests, "tables", clients.tables.list_tables(**asked)),
            await _look(requests, "containers", clients.blobs.list_containers(**asked)),
            *_clock(dates),
            *await _index(account, endpoint),
        ]
    finally:
        await account.close()


async def _look(requests: Requests, what: str, listed: AsyncIterable[object]) -> Finding:
    try:
        async with requests.ask(f"list the {what}"):
            async for _ in listed:
                break
    except DelaylineError as error:
        return what, False, str(error)
    return what, True, "can be listed"


async def _index(account: AzureAccount, endpoint: str | None) -> list[Finding]:
    """Return how many rows of the endpoint's table are of no use; nothing where it has no table yet."""
    if endpoint is None:
        return []
    table = AzureDelayedTable(account)
    try:
        await table.initialize(endpoint, TransactionMode.RECEIVE_ONLY)
        number = await table.count_orphans()
    except DelaylineError:
        return []
    finally:
        await table.close()
    orphans = f"{number} rows point at no message"
    return [("index", True, f"{orphans}; a running endpoint deletes them within hours" if number else orphans)]


def _clock(dates: Sequence[datetime]) -> list[Finding]:
    if not dates:
        return []
    ahead = datetime.now(UTC) - dates[-1]
    seconds = abs(ahead) // timedelta(seconds=1)
    if abs(ahead) <= CLOCKS_DIFFER:
        return [("clock", True, f"agrees with the service's within {max(seconds, 1)} s")]
    side = "ahead of" if ahead > timedelta(0) else "behind"
    return [("clock", False, f"{seconds} s {side} the service's: messages leave that much too early or late. Use NTP")]


def _dates_into(dates: list[datetime]) -> Callable[[Any], None]:
    def note(response: Any) -> None:  # noqa: ANN401 - a pipeline's response
        if (date := response.http_response.headers.get("Date")) is not None:
            dates.append(parsedate_to_datetime(date))

    return note
