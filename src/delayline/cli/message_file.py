"""Messages in files: CSV with a header line, or JSON Lines; bad lines are kept apart with their reasons."""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import reprlib
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage
from delayline.readable import in_the_future, parse_delay, parse_instant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

KEYS: Final = ("destination", "body", "delay", "delay_ms", "deliver_at", "id", "headers")
REASON_FIELD: Final = "reason"
REJECTED_SUFFIX: Final = ".rejected"
#: Bytes of a line, or characters of a CSV row, read into memory at once.
LONGEST_LINE: Final = 64 * 1024 * 1024
#: Characters of a name or value in a reason, and of a reason.
LONGEST_SHOWN: Final = 80
LONGEST_LINE_REASON: Final = 500
_SHOW: Final = reprlib.Repr()
_SHOW.maxstring = _SHOW.maxother = _SHOW.maxlong = LONGEST_SHOWN

TOO_LONG: Final = f"longer than {LONGEST_LINE // 1024 // 1024} MiB: keep large content elsewhere, and send where it is"

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line as the file has it: its fields, or, where they cannot be read, why."""

    number: int
    fields: Fields
    problem: str | None = None
    text: str = ""
    """The line as it is, of JSON Lines: for fields that cannot be written again."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """A message to be stored."""

    line: InputLine
    id: str
    destination: str
    body: Any
    headers: dict[str, str]
    due: datetime


class RowFile:
    """Reads row after row; `read_bytes` is its position in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes: int = 0
        name = path.name
        while name.endswith(REJECTED_SUFFIX):
            name = name.removesuffix(REJECTED_SUFFIX)
        self.is_csv: bool = _is_csv(path, Path(name).suffix.lower())
        self.columns: list[str] = []
        self._ids: dict[str, int] = {}

    def lines(self) -> Iterator[InputLine]:
        """Yield the lines. Raises ConfigurationError for a file that cannot be read, or with unknown columns."""
        try:
            with self.path.open("rb") as file:
                yield from self._csv_lines(file) if self.is_csv else self._json_lines(file)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error.strerror}") from error

    def row(self, line: InputLine, now: datetime) -> InputRow:
        """Parse the line. Raises InvalidMessage with the reason."""
        if line.problem is not None:
            raise InvalidMessage(line.problem)
        given = {name: value for name, value in line.fields.items() if value is not None and value != ""}
        unknown = given.keys() - {*KEYS, REASON_FIELD}
        if unknown:
            raise InvalidMessage(_unknown("key", min(unknown), given))
        if "destination" not in given:
            raise InvalidMessage("destination is missing")
        return InputRow(
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

    def _id(self, line: InputLine, given: Fields) -> str:
        if "id" not in given:
            return str(uuid.uuid5(uuid.NAMESPACE_OID, f"delayline {self.fingerprint} {line.number}"))
        message_id = str(given["id"]) if isinstance(given["id"], int) else _text(given, "id")
        first = self._ids.setdefault(message_id, line.number)
        if first != line.number:
            raise InvalidMessage(f"id {message_id!r} stands on line {first} already")
        return message_id

    def _counted(self, file: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Yield each line's first bytes, and whether they are all of it."""
        while raw := file.readline(LONGEST_LINE):
            self.read_bytes += len(raw)
            whole = end = len(raw) < LONGEST_LINE or raw.endswith(b"\n")
            while not end:
                rest = file.readline(LONGEST_LINE)
                self.read_bytes += len(rest)
                end = len(rest) < LONGEST_LINE or rest.endswith(b"\n")
            yield raw, whole

    def _json_lines(self, file: IO[bytes]) -> Iterator[InputLine]:
        for number, (raw, whole) in enumerate(self._counted(file), 1):
            if not whole:
                yield InputLine(number, {}, TOO_LONG)
                continue
            if not raw.strip():
                continue
            line = raw.decode("utf-8", "replace").rstrip()
            try:
                fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield InputLine(number, {"line": line}, f"not JSON: {error}")
                continue
            if isinstance(fields, dict):
                yield InputLine(number, fields, text=line)
            else:
                yield InputLine(number, {"line": line}, "not a JSON object")

    def _csv_lines(self, file: IO[bytes]) -> Iterator[InputLine]:
        csv.field_size_limit(LONGEST_LINE)
        lines = (
            # A cell that is longer than the limit is refused by the reader, and with it the line.
            (raw if whole else raw + b"\n").decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape")
            for number, (raw, whole) in enumerate(self._counted(file))
        )
        reader = csv.reader(lines, strict=True)
        self.columns = self._columns(reader)
        while (cells := _next_cells(reader)) is not None:
            if cells:
                yield self._csv_line(reader.line_num, cells)

    def _columns(self, reader: Any) -> list[str]:  # noqa: ANN401 - csv's reader has no public type
        header = _next_cells(reader)
        if isinstance(header, csv.Error):
            raise ConfigurationError(
                f"the first line of {self.path} is not CSV: {header}. It names the columns: {', '.join(KEYS)}"
            )
        columns = [name.strip() for name in header or []]
        for name in columns:
            if name not in {*KEYS, REASON_FIELD}:
                raise ConfigurationError(f"{self.path}: {_unknown('column', name, columns)}")
            if columns.count(name) > 1:
                raise ConfigurationError(f"{self.path} has two columns {name}: leave one of them out")
        if "destination" not in columns:
            raise ConfigurationError(f"{self.path} has no column destination. The first line names: {', '.join(KEYS)}")
        return columns

    def _csv_line(self, number: int, cells: list[str] | csv.Error) -> InputLine:
        if isinstance(cells, csv.Error):
            return InputLine(number, {}, f"not CSV: {cells}")
        fields: Fields = dict(zip(self.columns, cells, strict=False))
        try:
            "".join(cells).encode()
        except UnicodeEncodeError:
            fields = {name: cell.encode(errors="replace").decode() for name, cell in fields.items()}
            return InputLine(number, fields, "not UTF-8")
        if len(cells) != len(self.columns):
            return InputLine(number, fields, f"{len(cells)} cells under {len(self.columns)} columns: quote the commas")
        return InputLine(number, fields)


class RejectedFile:
    """Writes rejected lines in the input's format with their reasons; creates the file with the first."""

    def __init__(self, rows: RowFile) -> None:
        self.path: Path = rows.path.with_name(rows.path.name + REJECTED_SUFFIX)
        self.count: int = 0
        self._rows = rows
        self._file: IO[str] | None = None
        self._write: Callable[[InputLine, Fields], object]

    def add(self, line: InputLine, reason: str) -> None:
        """Write a line and why it was rejected."""
        if self._file is None:
            self._open()
        self.count += 1
        self._write(line, {REASON_FIELD: f"line {line.number}: {reason}"})

    def __enter__(self) -> RejectedFile:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        try:
            # A new file, so that no link is followed. In JSON a lone surrogate stays the escape that it was read from.
            file = self._file = self.path.open("x", encoding="utf-8", errors="backslashreplace", newline="")
        except OSError as error:
            raise self._unwritable(error) from error
        if self._rows.is_csv:
            columns = [*(name for name in self._rows.columns if name != REASON_FIELD), REASON_FIELD]
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            self._write = lambda line, added: writer.writerow(line.fields | added)
        else:
            self._write = lambda line, added: file.write(_json_line(line, added) + "\n")

    def _unwritable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{self.path}, for the lines that are rejected, cannot be written: {error.strerror}. "
            "Send a copy of the file from a folder of your own"
        )


def _json_line(line: InputLine, added: Fields) -> str:
    try:
        return json.dumps(line.fields | added, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # not finite, or nested too deep
        return json.dumps({"line": line.text, **added}, ensure_ascii=False)


def reason_of(error: Exception) -> str:
    """Return why a line was rejected, of a bounded length, in characters that any file and terminal takes."""
    reason = str(error).encode(errors="backslashreplace").decode()
    return reason if len(reason) <= LONGEST_LINE_REASON else f"{reason[:LONGEST_LINE_REASON]}..."


def _next_cells(reader: Any) -> list[str] | csv.Error | None:  # noqa: ANN401 - csv's reader has no public type
    try:
        cells: list[str] | None = next(reader, None)
    except csv.Error as error:
        return error
    return cells


def _is_csv(path: Path, suffix: str) -> bool:
    if suffix in {".csv", ".jsonl", ".ndjson", ".json"}:
        return suffix == ".csv"
    raise ConfigurationError(f"{path} is neither .csv nor .jsonl: rename it by its format")


def _unknown(what: str, name: str, given: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(name[:LONGEST_SHOWN], [key for key in KEYS if key not in given], 1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what} {_SHOW.repr(name)}{hint} Known are: {', '.join(KEYS)}"


def _text(given: Fields, name: str) -> str:
    if not isinstance(given[name], str):
        raise InvalidMessage(f"{name} must be a text, not {_SHOW.repr(given[name])}")
    return str(given[name])


def _body(body: object) -> object:
    """Return a text as it is; a message without body has an empty text."""
    return "" if body is None else body


def _headers(headers: object) -> dict[str, str]:
    if isinstance(headers, str):
        try:
            headers = json.loads(headers)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"headers are not JSON: {error}. Write them as {{'name': 'value'}}") from error
    if headers is None:
        return {}
    if not isinstance(headers, dict):
        raise InvalidMessage(f"headers must be an object of names and texts, not {_SHOW.repr(headers)}")
    return headers


def _due(given: Fields, now: datetime) -> datetime:
    ways = [name for name in ("delay", "delay_ms", "deliver_at") if name in given]
    if len(ways) != 1:
        named = " and ".join(ways) or "none"
        raise InvalidDueTime(f"give one of delay, delay_ms and deliver_at; there is {named}")
    way = ways[0]
    if way == "deliver_at":
        return in_the_future(parse_instant(_text(given, way)), now)
    delay = _milliseconds(given[way]) if way == "delay_ms" else parse_delay(_text(given, way))
    if delay <= timedelta(0):
        raise InvalidDueTime(
            f"{way} must be longer than zero, not {_SHOW.repr(given[way])}: a delayed message is due later"
        )
    try:
        return (now + delay).astimezone(UTC)
    except OverflowError as error:
        raise InvalidDueTime(f"{way} {_SHOW.repr(given[way])} leads beyond year 9999: use a shorter delay") from error


def _milliseconds(value: object) -> timedelta:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidDueTime(f"delay_ms must be a whole number, not {_SHOW.repr(value)}")
    try:
        return timedelta(milliseconds=int(value))
    except (ValueError, OverflowError) as error:
        raise InvalidDueTime(f"delay_ms must be a whole number, not {_SHOW.repr(value)}") from error
