"""Translates errors of the Azure clients: temporary, permanent, or for the caller to judge."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
)

from delayline.errors import BackendUnavailable, BackendUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PASSING: Final = frozenset({408, 429})
DENIED_STATUSES: Final = frozenset({401, 403})
MAYBE_DONE: Final = "Whether it was done is unknown: repeat it, with the same message_id where it sends a message. "
#: Seconds, from the begin of a stop, in which requests may still take their time; each later request has the second
#: limit.
STOP_SECONDS: Final = 8.0
STOPPING_REQUEST: Final = 2.0


class Requests:
    """The requests of a transport or store, each of which is answered within a limit or fails.

    The limit covers all that a request takes: the client's retries and their pauses, tokens, and reading the answer.

    Args:
        limit: seconds that a request may take.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._open: set[asyncio.Timeout] = set()
        self._answered = 0.0
        self._stop_at: float | None = None

    def begin(self) -> None:
        """Give every request its full limit, also after a `stop_soon`."""
        self._stop_at = None

    def stop_soon(self) -> None:
        """Limit the requests that are under way, and requests that follow, so that a stop ends within 20 seconds."""
        self._stop_at = stop_at = asyncio.get_running_loop().time() + STOP_SECONDS
        for timeout in self._open:
            if (when := timeout.when()) is not None and when > stop_at:
                timeout.reschedule(stop_at)

    @contextlib.asynccontextmanager
    async def ask(
        self, doing: str, *, at_most: float | None = None, semaphore: asyncio.Semaphore | None = None
    ) -> AsyncIterator[None]:
        """Run a request inside: translates its errors, and raises BackendUnavailable without an answer.

        Args:
            doing: The operation, for the error text, as in "send to queue 'sales'".
            at_most: Seconds, if less than the usual limit is left.
            semaphore: Limits concurrent requests; waiting for it ends when no request was answered within the limit.
        """
        async with contextlib.AsyncExitStack() as stack:
            if semaphore is not None:
                await self._enter(doing, semaphore)
                stack.callback(semaphore.release)
            limit = self._limit_now() if at_most is None else max(min(at_most, self._limit_now()), 0.0)
            with azure_errors(doing):
                try:
                    async with asyncio.timeout(limit) as timeout:
                        self._open.add(timeout)
                        stack.callback(self._open.discard, timeout)
                        yield
                except TimeoutError as error:
                    if not timeout.expired():
                        raise
                    raise _silent(doing, limit) from error
            self._answered = asyncio.get_running_loop().time()

    async def _enter(self, doing: str, semaphore: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            limit = self._limit_now()
            try:
                async with asyncio.timeout_at(since + limit):
                    await semaphore.acquire()
                    return
            except TimeoutError as error:
                if self._answered <= since:
                    raise BackendUnavailable(
                        f"cannot {doing}: Azure Storage has answered nothing for {limit:g} s (server_timeout). It was "
                        "not begun"
                    ) from error
                since = self._answered

    def _limit_now(self) -> float:
        if self._stop_at is None:
            return self._limit
        return min(self._limit, max(self._stop_at - asyncio.get_running_loop().time(), STOPPING_REQUEST))


def _silent(doing: str, limit: float) -> BackendUnavailable:
    return BackendUnavailable(
        f"cannot {doing}: Azure Storage did not answer within {limit:.3g} s (server_timeout). {MAYBE_DONE}".rstrip()
    )


@contextlib.contextmanager
def azure_errors(doing: str) -> Iterator[None]:
    """Raise BackendUnavailable or BackendUnusable for a client's error; errors about a single entity pass unchanged.

    Args:
        doing: the action that failed, for the text, as in "send to queue 'sales'". No text of a request is repeated: it
            may be signed.
    """
    try:
        yield
    except AzureError as error:
        translated = _translated(error, doing)
        if translated is None:
            raise
        raise translated from error
    except ValueError as error:
        if "shared key" in str(error).lower() or "credential" in str(error).lower():
            raise BackendUnusable(f"cannot {doing}: {_remedy('AuthenticationFailed')}") from error
        raise


def code_of(error: HttpResponseError) -> str:
    """Return Azure's code for the error; empty if it has none."""
    code = getattr(error, "error_code", None)
    if code is None:
        return ""
    return str(getattr(code, "value", code))


def _translated(error: AzureError, doing: str) -> Exception | None:
    if isinstance(error, ClientAuthenticationError) and error.status_code is None:
        return BackendUnusable(f"cannot {doing}: no credential works here. {_remedy('')}")
    if isinstance(error, HttpResponseError):
        status = error.status_code or 0
        if status in DENIED_STATUSES:
            code = code_of(error)
            return BackendUnusable(f"cannot {doing}: Azure Storage answered {status} {code}. {_remedy(code)}")
        if status >= 500 or status in PASSING:
            return BackendUnavailable(f"cannot {doing} now: Azure Storage answered {status} {code_of(error)}".rstrip())
        return None
    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return BackendUnavailable(
            f"cannot {doing}: {type(error).__name__}, no answer. {MAYBE_DONE}Is the account's name right, and does it "
            "have queues and tables? An account for blobs alone, or a premium account, does not"
        )
    return None


def _remedy(code: str) -> str:
    if code in {"AuthorizationPermissionMismatch", "AuthorizationFailure", "AuthorizationResourceTypeMismatch",
                "AuthorizationServiceMismatch"}:  # fmt: skip
        return (
            "Grant the roles Storage Queue Data Contributor, Storage Table Data Contributor and Storage Blob Data "
            "Contributor, or make the SAS for queues, tables and blobs, with all their permissions"
        )
    return (
        "Check the account key, the SAS and the day it expires, or log in (az login); and check this machine's clock: "
        "a request more than 15 minutes off is refused"
    )
