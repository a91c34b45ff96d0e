"""What errors of the Azure clients mean, in delayline's own: pass, never pass, or the caller's to judge."""

from __future__ import annotations

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
    from collections.abc import Iterator

PASSING: Final = frozenset({408, 429})
DENIED: Final = frozenset({401, 403})


@contextlib.contextmanager
def azure_errors(doing: str) -> Iterator[None]:
    """Raise BackendUnavailable or BackendUnusable for a client's error; what tells of one entity passes as it is.

    doing: what failed, for the text, as in "send to queue 'sales'". No text of a request is repeated: it may be signed.
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
    """Return Azure's name for the error: queues and containers tell it apart, a table's is in the text."""
    code = getattr(error, "error_code", None)
    if code is None:
        return ""
    return str(getattr(code, "value", code))


def _translated(error: AzureError, doing: str) -> Exception | None:
    if isinstance(error, ClientAuthenticationError) and error.status_code is None:
        return BackendUnusable(f"cannot {doing}: no credential works here. {_remedy('')}")
    if isinstance(error, HttpResponseError):
        status = error.status_code or 0
        if status in DENIED:
            code = code_of(error)
            return BackendUnusable(f"cannot {doing}: Azure Storage says {status} {code}. {_remedy(code)}")
        if status >= 500 or status in PASSING:
            return BackendUnavailable(f"cannot {doing} now: Azure Storage says {status} {code_of(error)}".rstrip())
        return None
    if isinstance(error, ServiceRequestError | ServiceResponseError):
        return BackendUnavailable(
            f"cannot {doing}: {type(error).__name__}, no answer. Is the account's name right, and does it have queues "
            "and tables? One for blobs alone, or a premium one, does not"
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
