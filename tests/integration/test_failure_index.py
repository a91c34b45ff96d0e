"""Groups of failed messages: all of them, read once, in every SQL database, and as far as other back ends show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest
from tests.eventually import eventually_async

from delayline import ConfigurationError, Headers, Message, MessageFilter
from delayline.dashboard.model import ErrorGroups, ErrorPage, Unavailable
from delayline.dashboard.service import EndpointService
from delayline.error_queue import BrowsedQueue
from delayline.failure_index import WIDTH, FailureIndex, GroupOrder
from delayline.memory import MemoryTransport
from delayline.message import to_wire_time
from delayline.settings import Settings
from delayline.spi import TransportOperation
from delayline.sql import SqlTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayline.sql.numbered_queue import SqlNumberedQueue

NOW: Final = datetime(2026, 11, 27, 12, tzinfo=UTC)
TRACE: Final = 'Traceback (most recent call last):\n  File "/app/orders.py", line 17, in handle\n{0}: of {1}\n'


@pytest.fixture
async def service(url: str, queues: SqlTransport) -> AsyncIterator[EndpointService]:
    """The dashboard's view of the endpoint."""
    del queues
    async with EndpointService(Settings(endpoint="billing", url=url), time_limit=60) as opened:
        yield opened


def failed(
    name: str,
    kind: str,
    *,
    file: str = "orders",
    queue: str = "billing",
    at: datetime = NOW,
    types: str = "Shop.Charge",
) -> Message:
    headers = {
        Headers.EXCEPTION_TYPE: kind,
        Headers.EXCEPTION_MESSAGE: f"of {name}",
        Headers.EXCEPTION_STACK_TRACE: TRACE.format(kind, name),
        Headers.FAILED_QUEUE: queue,
        Headers.ENCLOSED_MESSAGE_TYPES: types,
        Headers.TIME_OF_FAILURE: to_wire_time(at),
        "Tenant": "even" if name[-1] in "02468" else "odd",
    }
    return Message(name, headers, b"body")


async def put(transport: SqlTransport | MemoryTransport, messages: Sequence[Message]) -> None:
    for first in range(0, len(messages), 500):
        await transport.dispatch([TransportOperation(each, "error") for each in messages[first : first + 500]])


def shown(groups: ErrorGroups | Unavailable) -> ErrorGroups:
    assert isinstance(groups, ErrorGroups), groups
    return groups


def listed(page: ErrorPage | Unavailable) -> ErrorPage:
    assert isinstance(page, ErrorPage), page
    return page


async def test_groups_are_of_all_messages_the_newest_first(queues: SqlTransport, service: EndpointService) -> None:
    # Given more messages than a stretch of numbers has, one of them with damaged headers, and a late group
    await put(queues, [failed(f"often-{number}", "shop.Often") for number in range(WIDTH + 500)])
    await put(queues, [Message.from_encoded("strange", b"\xff", b"")])
    await put(queues, [failed(f"late-{number}", "shop.Late", queue="mail") for number in range(3)])
    await put(queues, [failed("late-typed", "shop.Late", types="Shop.Refund, Shop")])
    # When they are grouped
    groups = shown(await service.errors.groups())
    # Then each counts, those of the same exception and place together, with queues and types below
    assert (groups.known.read, groups.known.total, groups.known.text) == (WIDTH + 505, WIDTH + 505, "")
    late, strange, often = groups.groups
    assert (late.exception_type, late.place, late.count) == ("shop.Late", "orders.py:17 in handle", 4)
    kinds = [(kind.queue, kind.message_type, kind.count) for kind in late.kinds]
    assert kinds == [("mail", "Shop.Charge", 3), ("billing", "Shop.Refund", 1)]
    assert (strange.exception_type, strange.count) == ("(headers that cannot be read)", 1)
    assert (often.count, often.example) == (WIDTH + 500, f"of often-{WIDTH + 499}")
    assert often.by_day == {"2026-11-27": WIDTH + 500}


async def test_pages_go_on_where_the_last_one_ended(queues: SqlTransport, service: EndpointService) -> None:
    # Given a group between others
    for number in range(7):
        await put(queues, [failed(f"mine-{number}", "shop.Mine"), failed(f"other-{number}", "shop.Other")])
    wanted = MessageFilter(exception="Mine")
    # When it is read in pages, and another one fails in between
    first = listed(await service.errors.page(wanted, limit=4))
    await put(queues, [failed("mine-7", "shop.Mine")])
    second = listed(await service.errors.page(wanted, limit=4, before=first.next_before))
    # Then the pages have each message once, the newest first
    assert [row.id for row in first.rows] == ["mine-6", "mine-5", "mine-4", "mine-3"]
    assert [row.id for row in second.rows] == ["mine-2", "mine-1", "mine-0"]
    assert (second.next_before, second.matching) == (None, 8)


async def test_a_filter_means_the_same_in_a_list_and_in_a_retry(queues: SqlTransport, service: EndpointService) -> None:
    # Given messages that differ in a header only
    await put(queues, [failed(f"m-{number}", "shop.Mine") for number in range(9)])
    wanted = MessageFilter(header="Tenant", header_value="even")
    # When they are listed, and retried
    page = listed(await service.errors.page(wanted))
    job = await service.errors.retry_all(wanted, actor="ann", rate=None)
    # Then these are the same
    assert [row.id for row in page.rows] == ["m-8", "m-6", "m-4", "m-2", "m-0"]
    assert (page.matching, page.looked_at) == (None, 9)

    async def over() -> bool:
        record = await queues.action_log("error").action(job.name)
        return record is not None and record.over

    await eventually_async(over)
    assert [message.id for message in await queues.browse("billing", 10)] == ["m-0", "m-2", "m-4", "m-6", "m-8"]
    left = listed(await service.errors.page())
    assert [row.id for row in left.rows] == ["m-7", "m-5", "m-3", "m-1"]
    # And so it is for parts of bodies
    assert [row.id for row in listed(await service.errors.page(MessageFilter(body="bod"))).rows] == [
        row.id for row in left.rows
    ]
    assert listed(await service.errors.page(MessageFilter(body="nothing"))).rows == []
    # And groups, for which each message would be read, refuse these filters
    for each in (wanted, MessageFilter(body="bod"), MessageFilter(correlation="c-1")):
        refused = await service.errors.groups(each)
        assert isinstance(refused, Unavailable)
        assert "in the list of messages" in refused.reason


async def test_filters_that_match_everything_or_nothing(queues: SqlTransport, service: EndpointService) -> None:
    await put(queues, [failed(f"m-{number}", "shop.Mine") for number in range(3)])
    every, none = MessageFilter(exception="*"), MessageFilter(exception="Nothing")
    assert shown(await service.errors.groups(every)).matching == 3
    assert listed(await service.errors.page(every)).matching == 3
    assert shown(await service.errors.groups(none)).groups == []
    assert listed(await service.errors.page(none)).rows == []
    assert listed(await service.errors.page(MessageFilter(message_id="Nothing"))).rows == []


async def test_what_failed_since_the_last_look_is_new(queues: SqlTransport, service: EndpointService) -> None:
    # Given failures before and after a look
    hour = timedelta(hours=1)
    await put(queues, [failed(f"old-{number}", "shop.Old", at=NOW - hour) for number in range(4)])
    await put(queues, [failed("again", "shop.Old", at=NOW + hour), failed("first", "shop.New", at=NOW + hour)])
    # When they are grouped
    groups = shown(await service.errors.groups(since=NOW, order=GroupOrder.LARGEST))
    # Then the later ones are marked
    assert [(group.exception_type, group.count, group.new) for group in groups.groups] == [
        ("shop.Old", 5, 1),
        ("shop.New", 1, 1),
    ]
    assert (groups.new, groups.latest) == (2, NOW + hour)
    by_name = shown(await service.errors.groups(order=GroupOrder.NAME))
    assert [group.exception_type for group in by_name.groups] == ["shop.New", "shop.Old"]
    assert [group.new for group in by_name.groups] == [0, 0]
    # And groups are shown in pages
    page = shown(await service.errors.groups(order=GroupOrder.NAME, limit=1))
    rest = shown(await service.errors.groups(order=GroupOrder.NAME, limit=1, after=page.next_after))
    assert [group.exception_type for group in (*page.groups, *rest.groups)] == ["shop.New", "shop.Old"]
    assert rest.next_after is None


class Counting:
    """A queue that notes how many messages were read of it."""

    def __init__(self, queue: SqlNumberedQueue) -> None:
        self._queue = queue
        self.look = queue.look
        self.numbers = queue.numbers
        self.messages = queue.messages
        self.number = 0

    async def read(
        self, first: int, last: int | None, limit: int, *, newest_first: bool = False, bodies: bool = False
    ) -> Sequence[tuple[int, Message]]:
        rows = await self._queue.read(first, last, limit, newest_first=newest_first, bodies=bodies)
        self.number += len(rows)
        return rows


async def test_only_new_messages_are_read_again(queues: SqlTransport) -> None:
    # Given an index
    await put(queues, [failed(f"m-{number}", "shop.Mine") for number in range(1_200)])
    counting = Counting(queues.numbered_queue("error"))
    index, progress = FailureIndex(counting), list[tuple[int, int]]()
    await index.refresh(lambda *numbers: progress.append(numbers))
    assert (index.read, counting.number, progress) == (1_200, 1_200, [(1_200, 1_200)])
    # When some leave, as many arrive, and it is refreshed
    for number in (3, 700):
        assert await queues.take("error", f"m-{number}")
    await put(queues, [failed("new-1", "shop.New"), failed("new-2", "shop.New")])
    await index.refresh()
    # Then it has the present messages, and has read the new ones
    assert (index.read, counting.number) == (1_200, 1_202)
    assert {group.failure.exception: group.all.count for group in index.groups()} == {"shop.Mine": 1_198, "shop.New": 2}
    # And nothing is read where nothing has changed, nor kept of what has left
    await index.refresh()
    assert counting.number == 1_202
    await queues.purge("error")
    await index.refresh()
    assert (index.groups(), index.read, index.latest, list(index.numbers())) == ([], 0, None, [])


async def test_a_queue_without_numbers_is_grouped_as_far_as_it_is_shown() -> None:
    # Given queues in memory
    transport = MemoryTransport()
    await transport.setup_infrastructure(["error"])
    await put(transport, [failed(f"m-{number}", "shop.Mine") for number in range(WIDTH + 5)])
    index = FailureIndex(BrowsedQueue(transport, "error"))
    # When they are read
    await index.refresh()
    # Then all are grouped, and listed by their places
    assert [group.all.count for group in index.groups()] == [WIDTH + 5]
    assert list(index.numbers(before=4)) == [3, 2, 1]
    assert [message.id for message in (await index.queue.messages([2, 99_999])).values()] == ["m-1"]
    newest = await index.queue.read(1, None, 2, newest_first=True)
    assert [message.id for _, message in newest] == [f"m-{WIDTH + 4}", f"m-{WIDTH + 3}"]
    # And after a change the places are those of the next look
    await transport.take("error", "m-0")
    await put(transport, [failed("new", "shop.New")])
    await index.refresh()
    assert (index.total, index.read) == (WIDTH + 5, WIDTH + 5)
    assert {group.failure.exception: group.all.count for group in index.groups()} == {
        "shop.Mine": WIDTH + 4,
        "shop.New": 1,
    }
    assert [message.id for message in (await index.queue.messages([1])).values()] == ["m-1"]


def test_failed_messages_have_no_due_time() -> None:
    with pytest.raises(ConfigurationError, match="no due time"):
        MessageFilter.parse(["due=<now"], NOW).check_of_failed()
