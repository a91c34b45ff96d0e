"""Messages in files: CSV with a header line, or JSON Lines; bad lines are kept apart with their reasons."""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from delayline.cli.due import in_the_future, parse_delay, parse_instant
from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

KEYS: Final = ("destination", "body", "delay", "delay_ms", "deliver_at", "id", "headers")
REASON: Final = "reason"
REJECTED: Final = ".rejected"
_LONGEST_CELL: Final = 2**31 - 1

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line as the file has it: its fields, or, where they cannot be read, why."""

    number: int
    fields: Fields
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A message to be stored."""

    line: Line
    id: str
    destination: str
    body: Any
    headers: dict[str, str]
    due: datetime


class RowFile:
    """Reads rows one by one; `read_bytes` tells how far it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0
        name = path.name
        while name.endswith(REJECTED):
            name = name.removesuffix(REJECTED)
        self.is_csv = _is_csv(path, Path(name).suffix.lower())
        self.columns: list[str] = []
        self._ids: dict[str, int] = {}

    def lines(self) -> Iterator[Line]:
        """Yield the lines. Raises ConfigurationError for a file that cannot be read, or with unknown columns."""
        try:
            with self.path.open("rb") as file:
                yield from self._csv_lines(file) if self.is_csv else self._json_lines(file)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror}") from error

    def row(self, line: Line, now: datetime) -> Row:
        """Return what the line says; raises InvalidMessage saying what is wrong with it."""
        if line.problem is not None:
            raise InvalidMessage(line.problem)
        given = {name: value for name, value in line.fields.items() if value is not None and value != ""}
        unknown = given.keys() - {*KEYS, REASON}
        if unknown:
            raise InvalidMessage(_unknown("key", min(unknown), given))
        if "destination" not in given:
            raise InvalidMessage("destination is missing")
        return Row(
            line,
            id=self._id(line, given),
            destination=_text(given, "destination"),
            body=_body(line.fields.get("body")),
            headers=_headers(given.get("headers")),
            due=_due(given, now),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of the whole file: the rows without id get theirs from it and their line number."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _id(self, line: Line, given: Fields) -> str:
        if "id" not in given:
            return str(uuid.uuid5(uuid.NAMESPACE_OID, f"delayline {self.fingerprint} {line.number}"))
        message_id = str(given["id"]) if isinstance(given["id"], int) else _text(given, "id")
        first = self._ids.setdefault(message_id, line.number)
        if first != line.number:
            raise InvalidMessage(f"id {message_id!r} stands on line {first} already")
        return message_id

    def _counted(self, file: IO[bytes]) -> Iterator[bytes]:
        for raw in file:
            self.read_bytes += len(raw)
            yield raw

    def _json_lines(self, file: IO[bytes]) -> Iterator[Line]:
        for number, raw in enumerate(self._counted(file), 1):
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                fields, problem = {"line": raw.decode("utf-8", "replace").rstrip()}, f"not JSON: {error}"
                yield Line(number, fields, problem)
                continue
            if isinstance(fields, dict):
                yield Line(number, fields)
            else:
                yield Line(number, {"line": fields}, "not a JSON object")

    def _csv_lines(self, file: IO[bytes]) -> Iterator[Line]:
        csv.field_size_limit(_LONGEST_CELL)
        text = (
            raw.decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape")
            for number, raw in enumerate(self._counted(file))
        )
        reader = csv.reader(text, strict=True)
        self.columns = [name.strip() for name in next(reader, [])]
        for name in self.columns:
            if name not in {*KEYS, REASON}:
                raise ConfigurationError(f"{self.path}: {_unknown('column', name, self.columns)}")
        if "destination" not in self.columns:
            raise ConfigurationError(f"{self.path} has no column destination. The first line names: {', '.join(KEYS)}")
        while (cells := _next_cells(reader)) is not None:
            if cells:
                yield self._csv_line(reader.line_num, cells)

    def _csv_line(self, number: int, cells: list[str] | csv.Error) -> Line:
        if isinstance(cells, csv.Error):
            return Line(number, {}, f"not CSV: {cells}")
        fields: Fields = dict(zip(self.columns, cells, strict=False))
        if len(cells) != len(self.columns):
            return Line(number, fields, f"{len(cells)} cells under {len(self.columns)} columns: quote the commas")
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            fields = {name: cell.encode(errors="replace").decode() for name, cell in fields.items()}
            return Line(number, fields, "not UTF-8")
        return Line(number, fields)


class RejectedFile:
    """Keeps rejected lines in the same format with their reasons; there is no file while there are none."""

    def __init__(self, rows: RowFile) -> None:
        self.path = rows.path.with_name(rows.path.name + REJECTED)
        self.count = 0
        self._rows = rows
        self._file: IO[str] | None = None
        self._write: Callable[[Mapping[str, object]], object] = lambda _: None

    def add(self, line: Line, reason: str) -> None:
        """Write a line and why it was rejected."""
        if self._file is None:
            self._open()
        self.count += 1
        self._write({**line.fields, REASON: f"line {line.number}: {reason}"})

    def __enter__(self) -> RejectedFile:
        self.path.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        file = self._file = self.path.open("w", encoding="utf-8", newline="")
        if self._rows.is_csv:
            columns = [*(name for name in self._rows.columns if name != REASON), REASON]
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            self._write = writer.writerow
        else:
            self._write = lambda fields: file.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _next_cells(reader: Any) -> list[str] | csv.Error | None:  # noqa: ANN401 - csv's reader has no public type
    try:
        cells: list[str] | None = next(reader, None)
    except csv.Error as error:
        return error
    return cells


def _is_csv(path: Path, suffix: str) -> bool:
    if suffix in {".csv", ".jsonl", ".ndjson", ".json"}:
        return suffix == ".csv"
    raise ConfigurationError(f"{path} is neither .csv nor .jsonl: name it after what is in it")


def _unknown(what: str, name: str, given: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(name, [key for key in KEYS if key not in given], 1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what} {name!r}{hint} Known are: {', '.join(KEYS)}"


def _text(given: Fields, name: str) -> str:
    if not isinstance(given[name], str):
        raise InvalidMessage(f"{name} must be a text, not {given[name]!r}")
    return str(given[name])


def _body(body: object) -> object:
    """Return a text as it is; a message without body is an empty one."""
    return "" if body is None else body


def _headers(headers: object) -> dict[str, str]:
    if isinstance(headers, str):
        try:
            headers = json.loads(headers)
        except ValueError as error:
            raise InvalidMessage(f"headers are not JSON: {error}. Write them as {{'name': 'value'}}") from error
    if headers is None:
        return {}
    if not isinstance(headers, dict):
        raise InvalidMessage(f"headers must be an object of names and texts, not {headers!r}")
    return headers


def _due(given: Fields, now: datetime) -> datetime:
    ways = [name for name in ("delay", "delay_ms", "deliver_at") if name in given]
    if len(ways) != 1:
        found = " and ".join(ways) or "none"
        raise InvalidDueTime(f"give one of delay, delay_ms and deliver_at; there is {found}")
    way = ways[0]
    if way == "deliver_at":
        return in_the_future(parse_instant(_text(given, way)), now)
    delay = _milliseconds(given[way]) if way == "delay_ms" else parse_delay(_text(given, way))
    if delay <= timedelta(0):
        raise InvalidDueTime(f"{way} must be longer than zero, not {given[way]}: a delayed message is due later")
    try:
        return (now + delay).astimezone(UTC)
    except OverflowError as error:
        raise InvalidDueTime(f"{way} {given[way]} leads beyond year 9999: use a shorter one") from error


def _milliseconds(value: object) -> timedelta:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidDueTime(f"delay_ms must be a whole number, not {value!r}")
    try:
        return timedelta(milliseconds=int(value))
    except (ValueError, OverflowError) as error:
        raise InvalidDueTime(f"delay_ms must be a whole number, not {value!r}") from error
