"""A storage account: its address, credentials, and the clients of its queues, tables and containers."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit
from urllib.request import getproxies

from azure.core.pipeline.policies import AsyncRetryPolicy
from azure.core.pipeline.transport import AioHttpTransport
from azure.data.tables.aio import TableServiceClient
from azure.identity.aio import DefaultAzureCredential
from azure.storage.blob.aio import BlobServiceClient
from azure.storage.queue.aio import QueueServiceClient

from delayline.azure.names import checked_sanitizer
from delayline.checks import LoopGuard, positive_seconds
from delayline.errors import ConfigurationError, NotStarted
from delayline.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from azure.core.credentials_async import AsyncTokenCredential
    from azure.core.pipeline import PipelineRequest, PipelineResponse
    from azure.core.pipeline.transport import AsyncHttpTransport

    from delayline.azure.names import Sanitizer

AZURE_SCHEME: Final = "azure"
VARIABLE: Final = "AZURE_STORAGE_CONNECTION_STRING"
DNS_SUFFIX: Final = "core.windows.net"
ACCOUNT: Final = re.compile(r"[a-z0-9]{3,24}")
#: Options of delayline's own in a URL.
URL_OPTIONS: Final = frozenset({"queue_name_sanitizer", "server_timeout"})
SERVICES: Final = ("queue", "table", "blob")
#: Azurite's account, the same on every machine (https://learn.microsoft.com/azure/storage/common/storage-use-azurite).
DEVELOPMENT: Final = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6I"
    "FsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1;QueueEndpoint="
    "http://127.0.0.1:10001/devstoreaccount1;TableEndpoint=http://127.0.0.1:10002/devstoreaccount1"
)
#: Retries inside the client, which obeys Retry-After; longer outages are for the circuit breakers.
CLIENT_RETRIES: Final[Mapping[str, float]] = {"retry_total": 3, "retry_backoff_factor": 0.2}
#: Seconds that a request may take unless set otherwise.
REQUEST_TIMEOUT: Final = 15.0


class Retries(AsyncRetryPolicy[Any, Any]):
    """The core library's retry policy in place of the storage libraries' own, which ignore Retry-After and 429.

    A send without an answer is not repeated here: its caller decides.
    """

    async def send(self, request: PipelineRequest[Any]) -> PipelineResponse[Any, Any]:
        """Send the request without the options that only the storage libraries' own policy removes."""
        for option in ("hosts", "location_mode", "retry_hook", "retry_to_secondary"):
            request.context.options.pop(option, None)
        response = await super().send(request)
        vars(response.http_response)["location_mode"] = "primary"
        return response


#: Logs requests at INFO, and is at WARNING: `logging.getLogger("delayline.azure.http").setLevel("INFO")` shows them.
HTTP_LOGGER: Final = logging.getLogger("delayline.azure.http")
if HTTP_LOGGER.level == logging.NOTSET:  # the application may have set a level before this import
    HTTP_LOGGER.setLevel(logging.WARNING)


@dataclass(slots=True)
class Clients:
    """The clients of an open account."""

    queues: QueueServiceClient
    tables: TableServiceClient
    blobs: BlobServiceClient


class AzureAccount:
    """A storage account, shared by the transport and the delayed messages of an event loop.

    Args:
        url: `azure://ACCOUNT` with DefaultAzureCredential, `azure://ACCOUNT?SAS`, `azure:CONNECTION STRING`, or
            `azure:` alone, with the connection string in AZURE_STORAGE_CONNECTION_STRING.
        credential: Used in place of DefaultAzureCredential; not closed.
        http: Creates a client's HTTP transport, in place of aiohttp's.
        server_timeout: Seconds that a request may take with its retries; by default 15. In a URL
            `server_timeout=15` after `?`, in a connection string after `;`.

    Raises:
        ConfigurationError: The URL or another argument is invalid.
    """

    def __init__(
        self,
        url: str = f"{AZURE_SCHEME}:",
        *,
        credential: AsyncTokenCredential | None = None,
        http: Callable[[], AsyncHttpTransport[Any, Any]] | None = None,
        server_timeout: float | None = None,
    ) -> None:
        scheme, _, connection = url.partition(":")
        if scheme.lower() != AZURE_SCHEME:
            raise ConfigurationError(f"{scheme}: is not the URL of a storage account. Write azure://ACCOUNT")
        if not url.isascii():
            raise ConfigurationError(
                "the URL of the storage account has characters that are not ASCII: none of its parts can have one"
            )
        connection, options = _options_of(connection)
        url = f"{AZURE_SCHEME}:{connection}"
        self.server_timeout: float = (
            _seconds(options.get("server_timeout"))
            if server_timeout is None
            else positive_seconds("server_timeout", server_timeout)
        )
        """How many seconds a request may take, with its retries."""
        self.queue_name_sanitizer: Sanitizer | None = checked_sanitizer(options.get("queue_name_sanitizer"))
        """The sanitizer that the URL names for queue names; None for none."""
        self._connection = ""
        self._sas = ""
        self.name: str
        if connection.startswith("//"):
            self.name, self._suffix, self._sas = _parts_of(url)
        else:
            self._connection = _connection_string(connection)
            self.name, self._suffix = _name_in(self._connection), DNS_SUFFIX
        self._credential = credential
        self._http = http or _over_aiohttp
        self._users = 0
        self._clients: Clients | None = None
        self._open = AsyncExitStack()
        self._process = LoopGuard()

    @classmethod
    def at(cls, place: str | AzureAccount) -> AzureAccount:
        """Return the account itself, or a new account at the URL."""
        return place if isinstance(place, AzureAccount) else cls(place)

    def __repr__(self) -> str:
        return f"AzureAccount({self.name!r})"

    @property
    def clients(self) -> Clients:
        """The clients. Raises NotStarted unless the account is open."""
        if self._clients is None:
            raise NotStarted(f"storage account {self.name!r} is not open: start its transport or store first")
        self.check_process()
        return self._clients

    def check_process(self) -> None:
        """Raise NotStarted in a process that was forked from the process that opened the account."""
        self._process.check(f"storage account {self.name!r}")

    async def open(self) -> None:
        """Make the clients; no request is sent. Every open needs a `close`."""
        if self._clients is None:
            self._process = LoopGuard()
        self.check_process()
        self._users += 1
        if self._clients is None:
            try:
                self._clients = self._made()
            except ValueError as error:
                self._users -= 1
                raise ConfigurationError(
                    f"the connection string of storage account {self.name!r} cannot be used: copy it from the portal, "
                    "under Access keys (az storage account show-connection-string)"
                ) from error
            for client in (self._clients.queues, self._clients.tables, self._clients.blobs):
                await self._open.enter_async_context(client)

    async def close(self) -> None:
        """Undo an `open`; the last lets go of all connections."""
        self._users -= 1
        if self._users == 0 and not self._process.forked:
            self._clients = None
            await self._open.aclose()

    def _made(self) -> Clients:
        retries: dict[str, Any] = {**CLIENT_RETRIES, "timeout": self.server_timeout}
        queues: dict[str, Any] = {"transport": self._http(), "retry_policy": Retries(**retries), "logger": HTTP_LOGGER}
        tables: dict[str, Any] = {"transport": self._http(), **retries, "logger": HTTP_LOGGER}
        blobs: dict[str, Any] = {"transport": self._http(), "retry_policy": Retries(**retries), "logger": HTTP_LOGGER}
        if self._connection:
            return Clients(
                QueueServiceClient.from_connection_string(self._connection, **queues),
                TableServiceClient.from_connection_string(self._connection, **tables),
                BlobServiceClient.from_connection_string(self._connection, **blobs),
            )
        allowed = self._allowed()
        queue_url, table_url, blob_url = (f"https://{self.name}.{kind}.{self._suffix}{self._sas}" for kind in SERVICES)
        return Clients(
            QueueServiceClient(queue_url, credential=allowed, **queues),
            TableServiceClient(table_url, credential=allowed, **tables),
            BlobServiceClient(blob_url, credential=allowed, **blobs),
        )

    def _allowed(self) -> AsyncTokenCredential | None:
        if self._sas:
            return None
        if self._credential is not None:
            return self._credential
        own = DefaultAzureCredential()
        self._open.push_async_callback(own.close)
        return own


def _over_aiohttp() -> AioHttpTransport:
    """Return a transport that looks for a proxy, in a thread and at each request, only where a proxy is set."""
    return AioHttpTransport(use_env_settings=bool(getproxies()))


def _options_of(connection: str) -> tuple[str, dict[str, str]]:
    """Return the connection string after `azure:`, and delayline's options apart from it."""
    address, mark, query = connection.partition("?") if connection.startswith("//") else ("", "", connection)
    separator = "&" if mark else ";"
    options: dict[str, str] = {}
    kept = []
    for part in query.split(separator):
        name, _, value = part.partition("=")
        if name.strip() in URL_OPTIONS:
            options[name.strip()] = value.strip()
        else:
            kept.append(part)
    left = separator.join(kept)
    return address + (mark if left else "") + left, options


def _seconds(seconds: str | None) -> float:
    if seconds is None:
        return REQUEST_TIMEOUT
    try:
        return positive_seconds("server_timeout", float(seconds))
    except ValueError:
        raise ConfigurationError(
            f"server_timeout={seconds!r} of the storage account's URL must be a number of seconds above 0, as in 15"
        ) from None


def _parts_of(url: str) -> tuple[str, str, str]:
    """Return account, suffix of its hosts and SAS."""
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
    except ValueError:
        raise ConfigurationError(
            "the URL of the storage account cannot be read: write azure://ACCOUNT, 3 to 24 lower-case letters and "
            "digits, or azure:CONNECTION STRING"
        ) from None
    if ACCOUNT.fullmatch(parts.netloc) is None or parts.path.strip("/"):
        raise ConfigurationError(
            f"{masked(url.partition('?')[0])} does not name a storage account: write "
            "azure://ACCOUNT, 3 to 24 lower-case letters and digits, or azure:CONNECTION STRING"
        )
    if parts.query and "sig" not in query:
        raise ConfigurationError("what follows ? in azure://ACCOUNT?... must be a SAS: sv=...&sig=...")
    return parts.netloc, DNS_SUFFIX, f"?{parts.query}" if parts.query else ""


def _connection_string(given: str) -> str:
    """Return a connection string that the clients take; raises ConfigurationError, not repeating it."""
    connection = given or os.environ.get(VARIABLE, "")
    if not connection:
        raise ConfigurationError(
            f"no storage account is named: write azure://ACCOUNT, or put its connection string into {VARIABLE}"
        )
    pairs = dict(part.partition("=")[::2] for part in connection.split(";") if part.strip())
    if pairs.get("UseDevelopmentStorage", "").lower() == "true":
        return DEVELOPMENT
    named = "AccountName" in pairs or any(name.endswith("Endpoint") for name in pairs)
    if not named or not {"AccountKey", "SharedAccessSignature"} & set(pairs):
        raise ConfigurationError(
            "the connection string of the storage account lacks AccountName, or AccountKey or SharedAccessSignature: "
            "copy it from the portal, under Access keys (az storage account show-connection-string)"
        )
    _check_key(pairs.get("AccountKey"))
    _check_endpoints(pairs)
    return connection


def _check_key(key: str | None) -> None:
    try:
        base64.b64decode(key or "", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError("the AccountKey of the connection string is not base64: copy the whole key") from None


def _name_in(connection: str) -> str:
    pairs = dict(part.partition("=")[::2] for part in connection.split(";") if part.strip())
    if "AccountName" in pairs:
        return pairs["AccountName"]
    endpoint = next(value for name, value in pairs.items() if name.endswith("Endpoint"))
    return urlsplit(endpoint).netloc.partition(".")[0]


def _check_endpoints(pairs: Mapping[str, str]) -> None:
    for name, value in pairs.items():
        if name.endswith("Endpoint"):
            try:
                parts = urlsplit(value)
                usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
            except ValueError:
                usable = False
            if not usable:
                raise ConfigurationError(
                    f"the {name} of the connection string is not a URL: write it as in "
                    f"{name}=https://ACCOUNT.{name.removesuffix('Endpoint').lower()}.{DNS_SUFFIX}"
                )
