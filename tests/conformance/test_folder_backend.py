"""Conformance of the example of a third party's back end with delays of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.conformance.test_custom_store import load

from delayline.testing import NativeDeliveryConformance, TransportConformance

if TYPE_CHECKING:
    from delayline.spi import DelayedDelivery, Transport

example = load(Path(__file__).parents[2] / "examples/folder_backend/folder_backend.py")


class TestFolderTransport(TransportConformance):
    logs_expired = False

    async def make_transport(self, tmp_path: Path) -> Transport:
        transport: Transport = example.FolderTransport(example.Folder(f"folder://{tmp_path}"))
        return transport


class TestFolderDelivery(NativeDeliveryConformance):
    async def make_backends(self, tmp_path: Path) -> tuple[Transport, DelayedDelivery]:
        folder = example.Folder(f"folder://{tmp_path}")
        return example.FolderTransport(folder), example.FolderDelivery(folder)
