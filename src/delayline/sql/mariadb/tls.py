"""How PyMySQL encrypts, without reading this machine's certificates for each connection: a tenth of a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pymysql.connections import Connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping


class SharingConnection(Connection):
    """A connection that encrypts by default, without verifying the server, if the URL has no TLS option."""

    _shared: ClassVar[ssl.SSLContext | None] = None

    def _create_ssl_ctx(self, sslp: Mapping[str, Any]) -> ssl.SSLContext:
        if not sslp and self._shared is not None:
            return self._shared
        context: ssl.SSLContext = super()._create_ssl_ctx(sslp)  # type: ignore[misc]
        if not sslp:
            SharingConnection._shared = context
        return context
