"""Queue messages and table rows that real .NET endpoints wrote on Azure Storage (tests/data/nservicebus)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from azure.data.tables.aio import TableClient
from azure.storage.queue.aio import QueueClient
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.eventually import eventually_async
from tests.integration.azure_parts import SECOND, HandledMessages, connection, endpoint_at
from tests.integration.recordings import load

from delayline import Headers, InvalidMessage, Message, MessageContext, Recoverability
from delayline.azure.envelope import UnwrappedMessage, unwrap, wrap
from delayline.azure.names import delays_name
from delayline.azure.rows import ForeignRow, from_entity
from delayline.cli import main
from delayline.failures import FAILURE_HEADERS

if TYPE_CHECKING:
    from delayline import Endpoint

RECORDED: Final = load("azure-storage-queues")
TEXTS: Final = [one["message_text"] for one in RECORDED["queues"]["unread"]]
FAILED: Final = RECORDED["queues"]["error"][0]["message_text"]
[ROWS] = RECORDED["tables"].values()
#: Headers in the error queue that only one side writes: all differences there are.
ONLY_DOTNET: Final = {"NServiceBus.Version"}
ONLY_DELAYLINE: Final = {Headers.EXCEPTION_HELP_LINK}
EXCEPTION_DATA: Final = "NServiceBus.ExceptionInfo.Data."
#: What the error queue adds, in both.
DESCRIPTION: Final = (
    Headers.EXCEPTION_PREFIX,
    Headers.FAILED_QUEUE,
    Headers.TIME_OF_FAILURE,
    Headers.PROCESSING_MACHINE,
    Headers.PROCESSING_ENDPOINT,
    Headers.HOST_ID,
    Headers.HOST_DISPLAY_NAME,
)


def unwrapped(text: str) -> dict[str, Any]:
    wrapper: dict[str, Any] = json.loads(base64.b64decode(text).removeprefix(b"\xef\xbb\xbf"))
    return wrapper


async def texts_in(url: str, queue: str) -> list[str]:
    async with QueueClient.from_connection_string(connection(url), queue) as client:
        return [one.content for one in await client.peek_messages(max_messages=32)]


async def count(endpoint: Endpoint, queue: str, number: int) -> bool:
    return bool(await endpoint.transport.count(queue) == number)  # type: ignore[attr-defined]


async def test_recorded_messages_go_the_whole_way(azure_url: str) -> None:
    """Given messages of .NET, when they fail and are retried, then all of them is in each place as .NET has it."""
    noted, fails = HandledMessages(), True
    endpoint = endpoint_at(azure_url)
    endpoint.recoverability = Recoverability(0, delays=[SECOND])

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        await noted.handle(message, context)
        if fails:
            raise ValueError("it fails here")

    await endpoint.setup()
    async with QueueClient.from_connection_string(connection(azure_url), "sales") as queue:
        for text in TEXTS:
            await queue.send_message(text)
    # When each has failed, waited in the table, and failed again
    async with endpoint:
        await eventually_async(lambda: count(endpoint, "error", len(TEXTS)))
    failed = {one["Headers"][Headers.MESSAGE_ID]: one for one in map(unwrapped, await texts_in(azure_url, "error"))}
    ran = await asyncio.to_thread(CliRunner().invoke, main, ["errors", "retry", "--all", "--yes", "--url", azure_url])
    assert ran.exit_code == 0, ran.output
    retried = {one["Headers"][Headers.MESSAGE_ID]: one for one in map(unwrapped, await texts_in(azure_url, "sales"))}
    fails = False
    handled = list(noted)
    noted.clear()
    async with endpoint:
        await noted.until(len(TEXTS))
    # Then
    theirs = unwrapped(FAILED)
    described = {name for name in theirs["Headers"] if name.startswith(DESCRIPTION)}
    for text in TEXTS:
        sent = unwrapped(text)
        body, message_id = base64.b64decode(sent["Body"]), sent["Id"]
        for attempt in [one for one in [*handled, *noted] if one.headers[Headers.MESSAGE_ID] == message_id]:
            assert attempt.body == body
            assert attempt.headers.items() >= (sent["Headers"].items() - {(Headers.TIME_TO_BE_RECEIVED, "00:00:30")})
        error, back = failed[message_id], retried[message_id]
        for wrapper in (error, back):  # the members are those of .NET, in its order, with its types
            assert [(name, type(value)) for name, value in wrapper.items()] == [
                (name, type(value)) for name, value in theirs.items()
            ]
            assert wrapper["Body"] == sent["Body"]
        kept = sent["Headers"].keys() - {Headers.TIME_TO_BE_RECEIVED}
        assert {name: error["Headers"][name] for name in kept} == {name: sent["Headers"][name] for name in kept}
        added = error["Headers"].keys() - kept
        of_retry = {Headers.RETRIES_TIMESTAMP, Headers.DELIVER_AT}
        there = {name for name in described if not name.startswith(EXCEPTION_DATA)}
        assert added == there | of_retry | ONLY_DELAYLINE
        assert {name for name in added if error["Headers"][name] is None} == ONLY_DELAYLINE
        assert back["Headers"].keys() == {name for name in error["Headers"] if not name.startswith(FAILURE_HEADERS)}


async def test_a_failure_differs_from_dotnets_only_as_listed(azure_url: str) -> None:
    """Given a message that failed at .NET, when it fails here, then the error queue has its headers, but for two."""
    theirs = unwrapped(FAILED)
    added = {*ONLY_DOTNET, Headers.RETRIES_TIMESTAMP, Headers.DELIVER_AT}
    names = [name for name in theirs["Headers"] if not name.startswith(DESCRIPTION) and name not in added]
    sent = theirs | {"Headers": {name: theirs["Headers"][name] for name in names}}
    endpoint = endpoint_at(azure_url, "net")
    endpoint.recoverability = Recoverability(0, delays=[SECOND])

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        raise ValueError("it fails here, fails")

    await endpoint.setup()
    async with QueueClient.from_connection_string(connection(azure_url), "net") as queue:
        await queue.send_message(base64.b64encode(json.dumps(sent).encode()).decode())
    async with endpoint:
        await eventually_async(lambda: count(endpoint, "error", 1))
    [ours] = map(unwrapped, await texts_in(azure_url, "error"))
    names_there = {name for name in theirs["Headers"] if not name.startswith(EXCEPTION_DATA)}
    assert names_there - ours["Headers"].keys() == ONLY_DOTNET
    assert ours["Headers"].keys() - names_there == ONLY_DELAYLINE
    same = {Headers.FAILED_QUEUE, Headers.PROCESSING_ENDPOINT, Headers.EXCEPTION_MESSAGE, *names}
    assert {name: ours["Headers"][name] for name in same} == {name: theirs["Headers"][name] for name in same}
    members = {"Id", "MessageIntent", "ReplyToAddress", "TimeToBeReceived", "CorrelationId", "Recoverable"}
    assert {name: ours[name] for name in members} == {name: theirs[name] for name in members}


def value_of(column: dict[str, str]) -> str | bytes:
    [(kind, value)] = column.items()
    return base64.b64decode(value) if kind == "binary" else value


async def test_recorded_rows_are_dispatched(azure_url: str) -> None:
    """Given the table of a .NET endpoint, when one of its name runs here, then all rows reach their queue unchanged."""
    [name] = RECORDED["tables"]
    assert name == delays_name("recorder")
    endpoint = endpoint_at(azure_url, "recorder")
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure(["unread"])
    async with TableClient.from_connection_string(connection(azure_url), name) as table:
        for row in ROWS:
            await table.create_entity({column: value_of(value) for column, value in row.items()})
        async with endpoint:
            await eventually_async(lambda: count(endpoint, "unread", len(ROWS)))
            assert [one async for one in table.list_entities()] == []
    found = {one["Id"]: one for one in map(unwrapped, await texts_in(azure_url, "unread"))}
    for row in ROWS:
        wrapper = found[row["MessageId"]["str"]]
        assert wrapper["Headers"] == json.loads(row["Headers"]["str"])
        assert base64.b64decode(wrapper["Body"]) == value_of(row["Body"])


async def test_rows_and_messages_of_delayline_are_as_dotnets(azure_url: str) -> None:
    """Given what .NET sent, now and delayed, when the same is sent here, then envelope and columns are the same."""
    now = unwrapped(TEXTS[0])
    own = {"NServiceBus.Version", "$.diagnostics.originating.hostid", "NServiceBus.OpenTelemetry.StartNewTrace"}
    headers = {name: value for name, value in now["Headers"].items() if name not in own}
    body, due = base64.b64decode(now["Body"]), datetime(2050, 5, 1, 12, tzinfo=UTC)
    endpoint = endpoint_at(azure_url, "recorder")
    await endpoint.setup()
    await endpoint.transport.setup_infrastructure(["unread"])
    async with endpoint:
        await endpoint.send("unread", body, headers=headers, message_id=now["Id"])
        await endpoint.send("unread", body, headers=headers, message_id="d", deliver_at=due)
    [wrapper] = map(unwrapped, await texts_in(azure_url, "unread"))
    assert wrapper["Headers"].keys() == now["Headers"].keys() - own
    assert {**wrapper, "Headers": {}} == {**now, "Headers": {}}
    async with TableClient.from_connection_string(connection(azure_url), delays_name("recorder")) as table:
        [row] = [one async for one in table.list_entities() if one["PartitionKey"].isdigit()]
    types: dict[str, type] = {name: bytes if "binary" in value else str for name, value in ROWS[0].items()}
    assert {name: type(value) for name, value in row.items()} == types | {"NumberOfRetries": int}
    assert json.loads(row["Headers"]).keys() == json.loads(ROWS[0]["Headers"]["str"]).keys() - own


@given(st.sampled_from([*TEXTS, FAILED]), st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=6))
def test_damaged_recordings_are_read_or_kept_as_they_are(text: str, changes: list[tuple[int, int]]) -> None:
    """Given a recorded text with any bytes changed, then it is a message, and one that can be moved as it is."""
    raw = bytearray(base64.b64decode(text))
    for at, value in changes:
        raw[at % len(raw)] = value
    for damaged in (base64.b64encode(raw).decode(), raw.decode("latin-1"), text[: changes[0][0]] if changes else ""):
        message = unwrap("native", damaged)
        if isinstance(message, UnwrappedMessage):
            assert wrap(message) == damaged
        else:
            with contextlib.suppress(InvalidMessage):  # too large
                again = unwrap("native", wrap(message))
                assert (again.id, again.body, again.encoded_headers) == (
                    message.id,
                    message.body,
                    message.encoded_headers,
                )


@given(
    st.sampled_from(ROWS),
    st.dictionaries(
        st.sampled_from(["PartitionKey", "RowKey", "Destination", "Body", "MessageId", "Headers", "NumberOfRetries"]),
        st.one_of(st.none(), st.text(max_size=30), st.binary(max_size=30), st.integers(), st.booleans(), st.floats()),
    ),
)
def test_damaged_rows_are_read_or_stay(row: dict[str, dict[str, str]], changed: dict[str, Any]) -> None:
    """Given a recorded row with any columns changed, then it is a message, or reported as a foreign row."""
    entity = {column: value_of(value) for column, value in row.items()} | changed
    with contextlib.suppress(ForeignRow):
        assert from_entity(entity).message.due.tzinfo is UTC
