"""URLs of accounts: one that cannot work is refused at once, and no error has a secret."""

import base64
from datetime import timedelta
from urllib.parse import urlsplit

import pytest

from delayline import ConfigurationError, NotStarted
from delayline.azure import AzureAccount, AzureDelayedTable, AzureStorageQueueTransport

KEY = base64.b64encode(b"a secret").decode()
SAS = "sv=2022-11-02&sig=c2VjcmV0"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("azure://contoso", "contoso"),
        (f"azure://contoso?{SAS}", "contoso"),
        (f"azure:DefaultEndpointsProtocol=https;AccountName=contoso;AccountKey={KEY}", "contoso"),
        (f"azure:QueueEndpoint=https://contoso.queue.core.windows.net;SharedAccessSignature={SAS}", "contoso"),
        ("azure:UseDevelopmentStorage=true", "devstoreaccount1"),
        ("AZURE://contoso", "contoso"),
    ],
)
def test_an_account_is_known_by_its_name_only(url: str, name: str) -> None:
    account = AzureAccount(url)
    assert account.name == name
    assert repr(account) == f"AzureAccount('{name}')"


def test_the_connection_string_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=contoso;AccountKey={KEY}")
    assert AzureAccount().name == "contoso"
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    with pytest.raises(ConfigurationError, match="AZURE_STORAGE_CONNECTION_STRING"):
        AzureAccount()


@pytest.mark.parametrize(
    "url",
    [
        "azure://",
        "azure://Contoso_1",
        "azure://contoso/queue",
        f"azure://contoso:{KEY}@somewhere",
        "azure://contoso?secret=c2VjcmV0",
        "azure:c2VjcmV0",
        "azure:AccountName=contoso",
        f"azure:AccountKey={KEY}",
        "azure:AccountName=contoso;AccountKey=c2VjcmV0===!",
        "sqlite:///c2VjcmV0.db",
        "azure://x:]",
        "azure://[x",
        "azure://contoso\udcff",
        "azure://größe",
        "azure:AccountName=contoso;AccountKey=c2VjcmV0\udcff",
        "azure:AccountName=contoso;AccountKey=größe",
        f"azure:QueueEndpoint=https://x:];SharedAccessSignature={SAS}",
        f"azure:QueueEndpoint=https://x:99999999;SharedAccessSignature={SAS}",
        f"azure:QueueEndpoint=contoso;SharedAccessSignature={SAS}",
        "azure://contoso?server_timeout=soon",
        "azure://contoso?server_timeout=0",
        "azure:UseDevelopmentStorage=true;server_timeout=-1",
        "azure:UseDevelopmentStorage=true;server_timeout=nan",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        AzureAccount(url)
    assert "c2VjcmV0" not in str(refused.value)
    assert KEY not in str(refused.value)


def test_settings_that_azure_would_refuse_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="table_name"):
        AzureDelayedTable("azure://contoso", table_name="a-b")
    with pytest.raises(ConfigurationError, match="visibility_timeout"):
        AzureStorageQueueTransport("azure://contoso", visibility_timeout=timedelta(days=8))


@pytest.mark.parametrize("url", ["azure://contoso", f"azure://contoso?{SAS}"])
async def test_an_account_in_the_cloud_has_its_three_services(url: str) -> None:
    account = AzureAccount(url)
    with pytest.raises(NotStarted):
        _ = account.clients
    await account.open()
    clients = account.clients
    hosts = [urlsplit(one).netloc for one in (clients.queues.url, clients.tables.url, clients.blobs.url)]
    assert hosts == [f"contoso.{service}.core.windows.net" for service in ("queue", "table", "blob")]
    await account.close()


@pytest.mark.parametrize(
    ("url", "seconds"),
    [
        ("azure://contoso", 15.0),
        ("azure://contoso?server_timeout=2.5", 2.5),
        (f"azure://contoso?{SAS}&server_timeout=30", 30.0),
        ("azure:UseDevelopmentStorage=true;server_timeout=4", 4.0),
    ],
)
def test_the_limit_of_a_request_is_an_option_of_the_url(url: str, seconds: float) -> None:
    account = AzureAccount(url)
    assert account.server_timeout == seconds
    assert "server_timeout" not in account._sas + account._connection
    assert AzureAccount(url, server_timeout=7).server_timeout == 7


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "15"])
def test_a_limit_that_is_not_a_number_of_seconds_is_refused(seconds: float) -> None:
    for make in (AzureAccount, AzureStorageQueueTransport, AzureDelayedTable):
        with pytest.raises(ConfigurationError, match="server_timeout"):
            make("azure://contoso", server_timeout=seconds)
