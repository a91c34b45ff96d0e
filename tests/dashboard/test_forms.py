"""What people write into forms, and values that many browsers ask for at once."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.dashboard.pages import client_of, csrf_of
from tests.dashboard.world import fill

from delayline.dashboard import Actor
from delayline.dashboard.forms import body_of, editable, filter_of, header_lines, headers_of, instant_of, whole
from delayline.dashboard.live import Shared, event
from delayline.dashboard.service import EndpointService
from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage
from delayline.message import NO_VALUE, Message
from delayline.settings import Settings
from delayline.sql import SqlTransport
from delayline.testing import ManualClock
from delayline.transport import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

NOW = datetime(2026, 5, 1, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2h", NOW + timedelta(hours=2)),
        (" in 2h ", NOW + timedelta(hours=2)),
        ("1h30m", NOW + timedelta(minutes=90)),
        ("2026-05-01T12:00+02:00", NOW + timedelta(hours=1)),
    ],
)
def test_a_time_is_a_delay_or_an_instant(text: str, instant: datetime) -> None:
    assert instant_of(text, NOW) == instant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no time is given"),
        ("soon", "is not understood"),
        ("2026-05-01T12:00", "has no time zone"),
        ("9000000d", "beyond year 9999"),
        ("9" * 101, "characters"),
    ],
)
def test_another_text_is_refused_with_how_to_write_it(text: str, reason: str) -> None:
    with pytest.raises(InvalidDueTime, match=reason):
        instant_of(text, NOW)


def test_the_fields_of_a_search_are_a_filter() -> None:
    fields = dict.fromkeys(("id", "destination", "type", "header", "value", "from", "before"), "")
    assert filter_of(fields, NOW).names_nothing
    wanted = filter_of(fields | {"id": "a*", "type": "Remind", "value": "a,*", "from": "1h"}, NOW)
    assert str(wanted) == f"id=a\\*,type=*Remind*,header=:*a\\,\\**,due={(NOW + timedelta(hours=1)).isoformat()}.."
    with pytest.raises(ConfigurationError, match="second time must be later"):
        filter_of(fields | {"from": "2h", "before": "1h"}, NOW)


def test_headers_keep_their_values_as_lines_of_a_form() -> None:
    headers = {"a": "1", "trace": "one\ntwo\r\n\\n three", "empty": "", "colon": "a: b", "path": "C:\\new\\"}
    assert headers_of(header_lines(headers).replace("\n", "\r\n")) == headers


HEADERS = st.dictionaries(st.text(min_size=1, max_size=9) | st.just("a: b"), st.text(max_size=9), max_size=4)
PARTS = ["\ufeff", "\r\n", "\n", "\r", " ", "a", "\0", "<", "&amp;", "\t", "\x0c", "é", "</textarea>"]
BODIES = st.binary(max_size=20) | st.lists(st.sampled_from(PARTS), max_size=9).map("".join).map(str.encode)


def sent(text: str) -> str:
    """Return a field's text as a browser sends it that was given it in a page."""
    return text.replace("\0", "\ufffd").replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")


@given(HEADERS, BODIES)
@example({"a": "1"}, b"one\r\ntwo\r\n")
@example({"a": "1"}, b"\xef\xbb\xbf<x>\r\n</x>")
@example({"a": "1"}, b"\nfirst line is empty\n")
def test_a_form_gives_back_every_byte_or_is_not_shown(headers: dict[str, str], body: bytes) -> None:
    """Given any message, when its form is sent without an edit, then headers and body are the same to the byte."""
    fields = editable(Message("m", headers, body))
    if fields is not None:
        assert headers_of(sent(fields.headers)) == headers
        assert body_of(sent(fields.body), fields.marks) == body


@pytest.mark.parametrize(
    "body",
    [b"", b"plain", b'{"a": 1}\n', b"a\r\nb", b"\xef\xbb\xbf{}", b"\xef\xbb\xbf<a>\r\n</a>\r\n", "ä\x0c".encode()],
)
def test_texts_of_either_system_have_a_form(body: bytes) -> None:
    """Given text with either end of line, with and without a byte order mark, when edited, then there is a form."""
    assert editable(Message("m", {"a": "b: c", "d": "1\r\n2\\n"}, body)) is not None


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"a: b": "1"}, b""), ({" a": "1"}, b""), ({"a\nb": "1"}, b""), ({"": "1"}, b""), ({"a": "\0"}, b""),
        ({}, b"a\rb"), ({}, b"a\r\nb\n"), ({}, b"a\nb\r\n"), ({}, b"\0"), ({}, b"\xff"), ({}, b"x" * 70_000),
        ({"NServiceBus.FailedQ": " q"}, b""), ({"a": "\ud800"}, b""),
    ],
)  # fmt: skip
def test_what_a_form_would_change_has_none(headers: dict[str, str], body: bytes) -> None:
    assert editable(Message("m", headers, body)) is None


class Fields(HTMLParser):
    """What a browser would send of a page's form that nobody has edited."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._area: str | None = None
        self.feed(page.replace("\r\n", "\n").replace("\r", "\n"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "input" and "name" in given:
            self.found[given["name"]] = given.get("value", "")
        elif tag == "textarea":
            self._area = given["name"] or ""
            self.found[self._area] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea" and self._area is not None:
            self.found[self._area] = self.found[self._area].removeprefix("\n").replace("\n", "\r\n")
            self._area = None

    def handle_data(self, data: str) -> None:
        if self._area is not None:
            self.found[self._area] += data


@pytest.mark.parametrize("body", [b"\n a\n", b"a\r\nb", b"\xef\xbb\xbf<a b='1'>&amp;</textarea>\r\n", b"a\rb"])
def test_an_unedited_copy_is_the_same_message(body: bytes, tmp_path: Path) -> None:
    """Given a failed message, when its form is sent as it is, then the copy has its bytes; else there is no form."""
    url = f"sqlite:///{tmp_path / 'delayline.db'}"
    headers = {"a": "b: c\r\n", "empty": NO_VALUE, "NServiceBus.FailedQ": "sales"}

    async def at(work: Callable[[SqlTransport], Awaitable[Any]]) -> Any:  # noqa: ANN401 - whatever the work returns
        transport = SqlTransport(url)
        await transport.setup_infrastructure(["sales", "error"])
        await transport.start()
        try:
            return await work(transport)
        finally:
            await transport.stop()

    settings = Settings(endpoint="sales", url=url)
    asyncio.run(at(lambda it: it.dispatch([TransportOperation(Message("m 1", headers, body), "error")])))
    with client_of(settings, read_only=False, authorize=lambda _: Actor("ana", may_act=True)) as client:
        page = client.get("/errors/edit", params={"endpoint": "sales", "id": "m 1"}).text
        if body == b"a\rb":
            assert "A form would change this message" in page
            assert "<textarea" not in page
            return
        client.post("/errors/edit", data=Fields(page).found)
    [copy] = asyncio.run(at(lambda it: it.browse("sales", 2)))
    assert (copy.id, copy.body) == ("m 1", body)
    assert {name: copy.headers[name] for name in ("a", "empty")} == {"a": "b: c\r\n", "empty": ""}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [("a: 1\nnothing", "line 2"), (": 1", "line 1"), ("a: 1\na: 2", "line 2 of the headers repeats")],
)
def test_damaged_headers_are_refused_with_their_line(lines: str, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        headers_of(lines)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "101", "9" * 5000, "\u0661"])
def test_a_number_out_of_its_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="the rate must be a number from 1 to 100"):
        whole(text, "the rate", 100)


async def test_a_value_is_read_once_for_all_that_ask_until_it_is_old() -> None:
    # Given a value that many ask for at once
    clock, reads = ManualClock(), []
    go_on = asyncio.Event()

    async def read() -> int:
        reads.append(1)
        await go_on.wait()
        return len(reads)

    shared = Shared(read, 1.0, clock)
    asking = [asyncio.create_task(shared()) for _ in range(5)]
    await asyncio.sleep(0)
    # When one of them leaves
    asking[0].cancel()
    go_on.set()
    # Then the others have the value of one reading
    assert await asyncio.gather(*asking[1:]) == [1, 1, 1, 1]
    assert await shared() == 1
    # And it is read again when it is old
    await clock.advance(timedelta(seconds=1))
    assert await shared() == 2


async def test_a_failed_reading_is_not_kept_longer_than_a_value() -> None:
    clock = ManualClock()
    answers = iter([None, 7])

    async def read() -> int:
        answer = next(answers)
        if answer is None:
            raise ValueError("away")
        return answer

    shared = Shared(read, 1.0, clock)
    with pytest.raises(ValueError, match="away"):
        await shared()
    await clock.advance(timedelta(seconds=2))
    assert await shared() == 7


def test_an_event_of_several_lines_stays_one_event() -> None:
    assert event("<p>a\n\nb</p>\n") == "data: <p>a\ndata: \ndata: b</p>\n\n"


def test_a_search_whose_time_ends_leads_on_and_its_estimate_is_confirmed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a search that ends after 50 of 61 messages
    monkeypatch.setattr("delayline.dashboard.search.READ_AT_ONCE", 50)
    monkeypatch.setattr("delayline.dashboard.pages.EndpointService", partial(EndpointService, search_time=0))
    settings = asyncio.run(fill(f"sqlite:///{tmp_path / 'delayline.db'}"))
    with client_of(settings, read_only=False, authorize=lambda _: Actor("ana", may_act=True)) as client:
        # When it is followed
        first = client.get("/waiting?header=nothing").text
        links = re.findall(r'href="([^"]+)">Search on<', first)
        rest = client.get(links[0].replace("&amp;", "&")).text
        # Then the first page says how far it came, and the last one that nothing is left
        assert "Searched the first 50 of 61 messages, due until" in first
        assert "None of these match" in first
        assert "No waiting message matches" in rest
        assert "Search on" not in rest
        # And an action on all that match asks for the endpoint's name, because their number is an estimate
        shown = client.get("/waiting/all?type=shop.").text
        assert re.search(r"about \d+ messages match", shown)
        assert "Type <strong>sales</strong> to confirm" in shown
        form = {"csrf": csrf_of(client, "/waiting/all?type=shop."), "type": "shop.", "action": "cancel", "rate": "1000"}
        assert "Not started: about" in client.post("/waiting/all", data={**form, "confirm": "60"}).text
        assert "Started: cancel" in client.post("/waiting/all", data={**form, "confirm": "sales"}).text


def test_postponing_by_less_than_nothing_is_earlier_and_the_search_stays(tmp_path: Path) -> None:
    settings = asyncio.run(fill(f"sqlite:///{tmp_path / 'delayline.db'}"))
    with client_of(settings, read_only=False, authorize=lambda _: Actor("ana", may_act=True)) as client:
        # Given a search that shows a message
        search = "/waiting?destination=email"
        page = client.get(search).text
        message_id = re.findall(r'name="id" value="([^"]+)" aria-label', page)[0]
        [action] = re.findall(r'<form method="post" action="(/waiting\?[^"]+)"', page)
        before = due_shown(client.get(f"/waiting/message?id={message_id}").text)
        # When it is postponed by -10m
        form = {"csrf": csrf_of(client, search), "id": message_id, "action": "postpone", "due": "-10m"}
        answer = client.post(action, data=form)
        # Then the search is shown again, and the message is due ten minutes earlier
        assert "Done." in answer.text
        assert answer.url.params["destination"] == "email"
        assert due_shown(client.get(f"/waiting/message?id={message_id}").text) == before - timedelta(minutes=10)


def due_shown(page: str) -> datetime:
    """Return the due time on the page of a message."""
    return datetime.fromisoformat(re.findall(r'<time datetime="([^"]+)"', page)[0])
