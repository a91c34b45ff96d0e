"""Azure Storage refuses, throttles, disconnects, or does not answer: errors, retries, and losses."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from aiohttp import web
from azure.core.exceptions import ClientAuthenticationError
from azure.storage.queue import AccountSasPermissions, ResourceTypes, generate_account_sas
from tests.integration.azure_parts import SECOND, HandledMessages, connection, endpoint_at
from tests.integration.azure_proxy import Proxy, empty_page, refusal, vanishing

from delayline import BackendUnavailable, ConfigurationError, TransactionMode
from delayline.azure import AzureDelayedTable
from delayline.azure.doctor import examine
from delayline.azure.requests import azure_errors
from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.servers.azurite import AzuriteServer


@pytest_asyncio.fixture
async def proxy(azure_url: str) -> AsyncIterator[Proxy]:
    await endpoint_at(azure_url).setup()
    async with Proxy(azure_url) as proxy:
        yield proxy


async def test_a_throttled_request_is_sent_again_when_azure_is_reported(proxy: Proxy) -> None:
    # Given
    busy = proxy.instead("POST", r"/sales/messages", refusal(503, "ServerBusy", {"Retry-After": "1"}), times=1)
    full = proxy.instead("POST", r"\$batch", refusal(429, "TooManyRequests", {"Retry-After": "1"}), times=1)
    noted = HandledMessages()
    async with endpoint_at(proxy.url, noted=noted) as endpoint:
        asked = time.monotonic()
        await asyncio.gather(
            endpoint.send("sales", b"", message_id="now"), endpoint.send("sales", b"", message_id="later", delay=SECOND)
        )
        assert time.monotonic() - asked >= 1
        await noted.until(2)
    assert (busy.met, full.met) == (1, 1)
    assert sorted(message.id for message in noted) == ["later", "now"]


@pytest.mark.slow
async def test_an_outage_loses_no_message_counts_no_failure_and_is_no_hot_loop(proxy: Proxy) -> None:
    # Given queues that refuse everything when a message falls due
    noted = HandledMessages()
    async with endpoint_at(proxy.url, noted=noted) as endpoint:
        down = proxy.instead("POST", r"/sales/messages", refusal(503, "ServerBusy"))
        await endpoint.send("sales", b"", message_id="m", delay=SECOND)
        await asyncio.sleep(4)
        assert 0 < down.met < 20
        # When it is over
        down.times = 0
        await noted.until(1)
    assert [message.id for message in noted] == ["m"]


async def test_pages_without_rows_are_turned(proxy: Proxy) -> None:
    # Given a table that answers every first question with nothing but a token
    pages = proxy.instead("GET", r"/delays\w+\(\)\?(?!.*Next)", empty_page)
    noted = HandledMessages()
    async with endpoint_at(proxy.url, noted=noted) as endpoint:
        await endpoint.send("sales", b"", message_id="m", delay=SECOND)
        await noted.until(1)
    assert pages.met > 0


async def test_a_request_without_an_answer_is_an_error_that_may_pass(proxy: Proxy) -> None:
    async with endpoint_at(proxy.url) as endpoint:
        proxy.instead("POST", r"/sales/messages", vanishing)
        with pytest.raises(BackendUnavailable, match="sales"):
            await endpoint.send("sales", b"")


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "AuthenticationFailed", "clock"),
        (403, "AuthorizationPermissionMismatch", "Storage Table Data Contributor"),
    ],
)
async def test_rights_that_do_not_do_are_explained(proxy: Proxy, status: int, code: str, remedy: str) -> None:
    proxy.instead("GET", r"/delays\w+\(\)", refusal(status, code))
    with pytest.raises(BackendUnusable, match=remedy):
        await endpoint_at(proxy.url).start()


async def test_a_wrong_key_is_reported_without_the_key(azure_url: str, caplog: pytest.LogCaptureFixture) -> None:
    key = base64.b64encode(b"some other secret").decode()
    with caplog.at_level(logging.DEBUG), pytest.raises(BackendUnusable, match="account key") as refused:
        await endpoint_at(re.sub("AccountKey=[^;]*", f"AccountKey={key}", azure_url)).start()
    assert key not in str(refused.value)
    assert key not in caplog.text


async def test_an_account_that_is_not_there_is_explained() -> None:
    url = f"azure:AccountName=nobody;AccountKey={base64.b64encode(b'x').decode()}"
    places = "".join(f";{service}Endpoint=http://127.0.0.1:9/nobody" for service in ("Queue", "Table", "Blob"))
    with pytest.raises(BackendUnavailable, match="account's name"):
        await endpoint_at(url + places).start()


async def test_without_a_table_setup_is_the_remedy(azure_url: str) -> None:
    store = AzureDelayedTable(azure_url)
    with pytest.raises(BackendUnusable, match="delayline setup"):
        await store.initialize("sales", TransactionMode.RECEIVE_ONLY)


async def test_an_endpoint_whose_queue_azure_cannot_have_is_reported(azure_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Contoso\.Sales"):
        await endpoint_at(azure_url, "Contoso.Sales").start()


@pytest.mark.slow
async def test_leases_and_tables_outlive_a_restart_of_the_service(azurite: AzuriteServer, azure_url: str) -> None:
    """Azurite forgets leases; Azure does not. Either way nothing is lost."""
    noted = HandledMessages()
    async with endpoint_at(azure_url, noted=noted) as endpoint:
        await endpoint.send("sales", b"", message_id="m", delay=2 * SECOND)
        await asyncio.to_thread(azurite.stop)
        await asyncio.sleep(2.5)
        await asyncio.to_thread(azurite.start)
        await noted.until(1)
    assert [message.id for message in noted] == ["m"]


def sas(url: str, services: str) -> str:
    """Return the account's URL with a SAS for these services, instead of its key."""
    pairs = dict(part.partition("=")[::2] for part in connection(url).split(";") if part)
    token = generate_account_sas(
        pairs["AccountName"],
        pairs["AccountKey"],
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(
            read=True, write=True, delete=True, list=True, add=True, create=True, update=True, process=True
        ),
        datetime.now(UTC) + timedelta(minutes=5),
        services=services,
    )
    places = [f"{name}={value}" for name, value in pairs.items() if name.endswith("Endpoint")]
    return "azure:" + ";".join([*places, f"SharedAccessSignature={token}"])


async def test_a_sas_does_where_it_has_the_rights(azure_url: str) -> None:
    noted = HandledMessages()
    async with endpoint_at(sas(azure_url, "qtb"), noted=noted) as endpoint:
        await endpoint.send("sales", b"", delay=SECOND)
        await noted.until(1)
    with pytest.raises(BackendUnusable, match="SAS"):
        await endpoint_at(sas(azure_url, "q")).start()


@pytest.mark.parametrize(("hours", "words"), [(1, "ahead of"), (-1, "behind")])
async def test_a_clock_that_differs_from_the_services_is_reported(proxy: Proxy, hours: int, words: str) -> None:
    def listed(_: web.Request) -> web.Response:
        date = format_datetime(datetime.now(UTC) - timedelta(hours=hours), usegmt=True)
        text = '<?xml version="1.0"?><EnumerationResults><Queues/><Containers/></EnumerationResults>'
        return web.Response(text=text, content_type="application/xml", headers={"Date": date})

    proxy.instead("GET", "comp=list", listed)
    findings = {what: (ok, text) for what, ok, text in await examine(proxy.url)}
    assert findings["clock"][0] is False
    assert words in findings["clock"][1]


async def test_an_identity_without_credentials_is_explained() -> None:
    with pytest.raises(BackendUnusable, match="az login"), azure_errors("connect"):
        raise ClientAuthenticationError("DefaultAzureCredential failed to retrieve a token")
