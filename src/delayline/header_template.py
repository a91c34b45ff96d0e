"""Headers that most sends of an endpoint share: the same names, and a few values that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.message import Message, encode_headers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class HeaderTemplate:
    """Makes headers from the values that differ: as a mapping, or as stores keep them, whichever is wanted first.

    JSON's encoder would take as long as all the rest of a send, and its decoder half of that.
    varying: the names of those values, in their order. fixed: the other headers.
    """

    def __init__(self, varying: Sequence[str], fixed: Mapping[str, str]) -> None:
        self._varying = tuple(varying)
        self._fixed = dict(fixed)
        places = encode_headers(dict.fromkeys(varying, "%s")).decode()
        self._json = f"{places[:-1]},{encode_headers(fixed).decode()[1:].replace('%', '%%')}"

    def message(self, id: str, values: tuple[str, ...], body: bytes) -> Message:
        """Return a message with these values, which JSON writes as they are: no quotes, backslashes, controls."""
        return Message.from_template(id, self, values, body)

    def headers(self, values: tuple[str, ...]) -> dict[str, str]:
        """Return all headers."""
        return dict(zip(self._varying, values, strict=True)) | self._fixed

    def encoded(self, values: tuple[str, ...]) -> bytes:
        """Return all headers as `encode_headers` does."""
        return (self._json % values).encode("utf-8", "surrogatepass")
