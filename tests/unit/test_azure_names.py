"""Names and keys: NServiceBus's own vectors, Azure's rules, and due times that are never early."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import ConfigurationError, InvalidDueTime
from delayline.azure import AzureAccount, AzureStorageQueueTransport
from delayline.azure.names import (
    Key,
    checked_table_name,
    delays_name,
    due_of,
    id_key,
    latest_due,
    message_key,
    place_key,
    queue_name,
)
from delayline.clock import EPOCH

ONE_SECOND = timedelta(seconds=1)
SECONDS = st.integers(-62_104_060_800, 253_402_300_798)  # of the years 2 to 9999
INSTANTS = st.builds(lambda second, fraction: EPOCH + timedelta(0, second, fraction), SECONDS, st.integers(0, 999_999))


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("The quick brown fox jumps over the lazy dog", "delays2fd4e1c67a2d28fced849ee1bb76e7391b93eb12"),
        ("publisher", "delaysb497a0aad7d4c7179b4fa30ccb0b930e674048dd"),
        ("Sales", "delaysd0edfb6e8c55c8742a83f0f192886e0e15fa0347"),
        ("sales", "delays59248c4dae276a021cb296d2ee0e6a0c962a8d7f"),
        ("Contoso.Sales", "delaysc020b82bdef476d113b9a5987918421f23755656"),
        ("native-integration-asq", "delays15e91e0a6dcd3b770a579cd8ddaea448537d29bd"),
    ],
)
def test_table_and_container_are_named_as_nservicebus_names_them(endpoint: str, name: str) -> None:
    assert delays_name(endpoint) == name


@pytest.mark.parametrize("name", ["abc", "A" * 63, "NativeDelayedMessagesForSender", "a1b"])
def test_a_table_name_is_lower_cased(name: str) -> None:
    assert checked_table_name(name) == name.lower()


@pytest.mark.parametrize("name", ["", "ab", "1ab", "a-b", "a_b", "a" * 64, "äbc", "abc\n"])
def test_a_table_name_that_no_container_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="letter"):
        checked_table_name(name)


@pytest.mark.parametrize("name", ["abc", "Contoso-Sales", "a" * 63, "1-2-3", "CON"])
def test_a_queue_name_is_lower_cased(name: str) -> None:
    assert queue_name(name) == name.lower()


@pytest.mark.parametrize(
    "name", ["", "ab", "a" * 64, "-ab", "ab-", "a--b", "a.b", "a_b", "größe", "a b", "abc\n", "ßab"]
)
def test_a_queue_name_that_azure_refuses_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="3 to 63"):
        queue_name(name)


def test_a_key_is_the_second_that_is_over_when_the_message_is_due() -> None:
    due = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)
    assert message_key("m1", due) == Key("2026030112", "20260301120004_m1")
    assert message_key("m1", due + timedelta(microseconds=1)) == Key("2026030112", "20260301120005_m1")
    assert message_key("m1", datetime(2026, 3, 1, 12, tzinfo=UTC)) == Key("2026030111", "20260301115959_m1")


def test_a_row_of_dotnet_is_due_when_its_second_is_over() -> None:
    assert due_of("20260301120005_0123456789abcdef0123456789abcdef") == datetime(2026, 3, 1, 12, 0, 6, tzinfo=UTC)
    assert due_of("20260301120005") == datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)


@pytest.mark.parametrize("row", ["", "2026", "20261301120005_x", "id", "20260301120005x", "\uff12" * 14])
def test_entries_without_a_due_time_are_not_messages(row: str) -> None:
    assert due_of(row) is None


@given(due=INSTANTS, at=INSTANTS)
def test_a_message_is_taken_when_due_and_never_early(due: datetime, at: datetime) -> None:
    key, latest = message_key("m", due), latest_due(at)
    kept = due_of(key.row)
    assert kept is not None
    assert timedelta(0) <= kept - due < ONE_SECOND
    taken = key.partition <= latest.partition and key.row <= latest.row
    assert taken == (kept <= at)
    assert message_key("m", kept) == key


@given(due=INSTANTS, hours=st.integers(-12, 14))
def test_the_zone_of_a_due_time_does_not_matter(due: datetime, hours: int) -> None:
    try:
        elsewhere = due.astimezone(timezone(timedelta(hours=hours)))
    except OverflowError:
        return
    assert message_key("m", elsewhere) == message_key("m", due)


def test_the_last_second_of_all_is_the_last_that_can_be_kept() -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert due_of(message_key("m", last).row) == last
    with pytest.raises(InvalidDueTime, match="rounded up"):
        message_key("m", last + timedelta(microseconds=1))
    assert due_of(message_key("m", datetime(1, 1, 1, tzinfo=UTC)).row) == datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC)


@given(one=st.text(max_size=300), other=st.text(max_size=300))
def test_ids_have_keys_that_azure_takes_and_that_differ(one: str, other: str) -> None:
    assert (id_key(one) == id_key(other)) == (one == other)
    assert id_key(one).isascii()
    assert not set(id_key(one)) & set("/\\#?'%")
    assert len(id_key(one)) <= 250
    assert place_key(one).partition > "9"


def test_a_sanitizer_makes_queues_of_names_with_dots() -> None:
    by_name = AzureStorageQueueTransport("azure://contoso", queue_name_sanitizer="dots-to-hyphens")
    by_url = AzureStorageQueueTransport("azure://contoso?queue_name_sanitizer=dots-to-hyphens")
    in_text = AzureStorageQueueTransport(
        AzureAccount("azure:UseDevelopmentStorage=true;queue_name_sanitizer=dots-to-hyphens")
    )
    own = AzureStorageQueueTransport("azure://contoso", queue_name_sanitizer=lambda name: name.replace(".", "-"))
    for transport in (by_name, by_url, in_text):
        assert transport.address_of("Contoso.Sales") == "contoso-sales"
        assert transport.qualified("Contoso.Sales", "Timeouts") == "contoso-sales-timeouts"
    assert own.address_of("Contoso.Sales") == "Contoso-Sales"
    assert AzureStorageQueueTransport("azure://contoso").address_of("Contoso.Sales") == "Contoso.Sales"


def test_two_names_that_a_sanitizer_makes_one_are_refused() -> None:
    transport = AzureStorageQueueTransport("azure://contoso", queue_name_sanitizer="dots-to-hyphens")
    assert transport.address_of("Contoso.Sales-EU") == transport.address_of("contoso-sales-eu")
    with pytest.raises(ConfigurationError, match=r"'Contoso.Sales-EU' and 'Contoso-Sales.EU' would both be the queue"):
        transport.address_of("Contoso-Sales.EU")


async def test_queues_that_would_be_one_are_not_set_up() -> None:
    transport = AzureStorageQueueTransport("azure://contoso", queue_name_sanitizer="dots-to-hyphens")
    with pytest.raises(ConfigurationError, match=r"'Contoso.Sales' and 'contoso-sales' would both be the queue"):
        await transport.setup_infrastructure(["Contoso.Sales", "contoso-sales"])


def test_a_sanitizer_that_cannot_be_used_is_refused() -> None:
    for url in (
        "azure://contoso?queue_name_sanitizer=hyphens",
        "azure:UseDevelopmentStorage=true;queue_name_sanitizer=",
    ):
        with pytest.raises(ConfigurationError, match="dots-to-hyphens"):
            AzureAccount(url)

    def failing(name: str) -> str:
        raise LookupError(name)

    for sanitizer, text in ((failing, "failed for 'Sales'"), (lambda _: None, "must return a text")):
        transport = AzureStorageQueueTransport("azure://contoso", queue_name_sanitizer=sanitizer)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=text):
            transport.address_of("Sales")
