"""RavenDB's export files are read document by document, whole or not at all."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from examples.ravendb_source import ravendb_source as ravendb
from examples.ravendb_source.ravendb_source import _collected, documents

from delayline.errors import BackendUnusable

if TYPE_CHECKING:
    from pathlib import Path

#: Version 3 has its indexes first; version 4 has attachments between documents, whatever bytes they are made of.
OLD = b'{"Indexes": [{"name": "a", "definition": {"Map": "from d in docs [\\"}\\""}}],"Docs":[ {"a": "}\\\\"} , {}]}'
NEW = (
    b'\xef\xbb\xbf{"BuildVersion":40047,"DatabaseRecord":{"x":[1,[2]]},"Docs":[{"@metadata":{"@export-type":"Attachment"},"Hash":"h",'
    b'"Size":5,"Tag":"t"}"]}\xff{,{"b": "[{\xc3\x9f", "c": [{"d": null}], "e": -1.5e3, "f": true}],"Tombstones":[]}'
)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
def test_documents_of_both_shapes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, packed: bool
) -> None:
    monkeypatch.setattr(ravendb, "CHUNK_BYTES", chunk)
    path = tmp_path / "dump"
    for content, expected in (
        (OLD, [{"a": "}\\"}, {}]),
        (NEW, [{"b": "[{ß", "c": [{"d": None}], "e": -1500.0, "f": True}]),
        (b'{"Docs":[]}', []),
    ):
        path.write_bytes(gzip.compress(content) if packed else content)
        assert list(documents(path)) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b'{"Docs":{}}', b'{"Docs":[{}', b'{"Docs":[{"a": "}', b'{"Docs":[1]}', b"PK\x03\x04zip",
        gzip.compress(OLD, mtime=0)[:-12], gzip.compress(OLD, mtime=0)[:20],
        b'{"Docs":[{"@metadata":{"@export-type":"Attachment"},"Size":9}abc]}', b"\x1f\x8b" + bytes(40),
    ],
)  # fmt: skip
def test_truncated_exports_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dump"
    path.write_bytes(content)
    with pytest.raises(BackendUnusable, match="dump is not a complete RavenDB export"):
        list(documents(path))


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BackendUnusable, match=r"cannot read .*none: No such file"):
        list(documents(tmp_path / "none"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a file whose documents take 8 MB
    monkeypatch.setattr(ravendb, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / "dump"
    document = json.dumps({"State": "x" * 2000, "@metadata": {"@id": "TimeoutDatas/1"}}).encode()
    with gzip.open(path, "wb", compresslevel=1) as file, io.BufferedWriter(file, 1 << 20) as out:
        out.write(b'{"Docs":[' + document)
        for _ in range(4000):
            out.write(b"," + document)
        out.write(b"]}")
    # When it is read
    tracemalloc.start()
    number = sum(1 for _ in documents(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Then a few chunks were in memory
    assert number == 4001
    assert peak < 12 * ravendb.CHUNK_BYTES


def test_hostile_exports_of_ravendb_end_with_a_sentence(tmp_path: Path) -> None:
    for content in (
        b'{"Docs":[{"@metadata":{"@export-type":"Attachment"},"Size":-60}',
        b'{"Docs":[{"@metadata":{"@export-type":"Attachment"},"Size":' + b"9" * 4500 + b"}",
        b'{"Docs":[' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"]}",
    ):
        export = tmp_path / "x.ravendbdump"
        export.write_bytes(content)
        with pytest.raises(BackendUnusable, match="is not a complete RavenDB export"):
            list(documents(export))


@pytest.mark.parametrize(
    "changed",
    [
        {"@metadata": "x"},
        {"@metadata": {"@id": ["x"]}},
        {"OwningTimeoutManager": {"a": 1}},
        {"Destination": {"Queue": ["x"]}},
        {"Destination": ["x"]},
        {"Time": 9**4000},
        {"Headers": {"a": "\ud800"}},
        {"State": 5},
    ],
)
def test_a_hostile_document_of_ravendb_is_one_row(changed: dict[str, Any]) -> None:
    good = {"Destination": "billing", "Time": "2030-01-01T00:00:00Z", "State": "", "Headers": {}, "Id": "a"}
    one = _collected({**good, "OwningTimeoutManager": "sales", **changed})
    assert one.key
    assert one.id == "a"
