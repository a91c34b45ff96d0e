"""The statements of an inbox and an outbox, compiled for every product."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import String

from delayline import ConfigurationError, SqlInbox, SqlOutbox
from delayline.inbox import key_of
from delayline.message import Headers, Message

URLS = [
    "sqlite:///a.db",
    "postgresql://server/shop",
    "mariadb://server/shop",
    "mysql://server/shop",
    "mssql://server/shop",
]


@pytest.mark.parametrize("url", URLS)
def test_they_can_be_compiled(url: str) -> None:
    statements = SqlInbox(url)._statements
    assert "delayline_inbox" in statements.record.sql
    for statement in (statements.known, statements.end_of_page, statements.remove):
        assert "delayline_inbox" in statement.sql
    table = SqlOutbox(url).table_of("shop")
    assert table.name == "shop.outbox"
    assert isinstance(table.c.id.type, String)
    assert table.c.id.type.length == 250 + 56


@pytest.mark.parametrize("window", [timedelta(0), timedelta(milliseconds=999), timedelta(days=4000), timedelta(-1)])
def test_a_window_out_of_range_is_refused(window: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        SqlInbox(URLS[0], window=window)


def test_a_key_can_be_kept_whatever_the_sender_calls_itself() -> None:
    names = ["", "shop", "x" * 200, "x" * 201, "\0", "\ud800"]
    keys = [key_of(Message("17", {Headers.ORIGINATING_ENDPOINT: name}, b"")) for name in names]
    assert len(set(keys)) == len(names)
    assert [key.sender for key in keys[:3]] == names[:3]
    assert all(len(key.sender) == 64 for key in keys[3:])
