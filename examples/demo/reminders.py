"""The demo's messages: reminders to customers, the same ones every time."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLUMNS: Final = ("id", "destination", "body", "delay_ms")
DESTINATION: Final = "customers"
ROWS: Final = 10_000
SEED: Final = 2014
SHORTEST_MS: Final = 3_000
LONGEST_MS: Final = 15_000
TEXTS: Final = (
    "Your basket is still waiting",
    "Your table is booked for tonight",
    "Your parcel arrives tomorrow",
    "Your trial ends in three days",
    "Your invoice is due on Friday",
)


@dataclass(frozen=True, slots=True)
class Reminder:
    """One row: what is to arrive, where, and how long after it was sent."""

    id: str
    destination: str
    body: str
    delay_ms: int


def generate(count: int = ROWS, seed: int = SEED) -> list[Reminder]:
    """Return reminders due 3 to 15 seconds after they are sent; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - made up rows, not secrets
    return [
        Reminder(
            id=f"reminder-{number:05}",
            destination=DESTINATION,
            body=json.dumps({"customer": chance.randrange(1, 5000), "text": chance.choice(TEXTS)}),
            delay_ms=chance.randint(SHORTEST_MS, LONGEST_MS),
        )
        for number in range(1, count + 1)
    ]


def read(path: Path) -> list[Reminder]:
    """Return the reminders of a CSV file. Raises ConfigurationError when it is not one."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                Reminder(row["id"], row["destination"], row["body"], int(row["delay_ms"]))
                for row in csv.DictReader(file, strict=True)
            ]
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise ConfigurationError(
            f"{path} holds no reminders ({type(error).__name__}: {error}). "
            f"It needs the columns {', '.join(COLUMNS)}; write one with `python -m examples.reminders.generate`"
        ) from error


def write(path: Path, reminders: Iterable[Reminder]) -> None:
    """Write reminders as a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((one.id, one.destination, one.body, one.delay_ms) for one in reminders)


def within(reminders: Sequence[Reminder], seconds: float) -> list[Reminder]:
    """Return the reminders with their delays shortened, or stretched, so that the last is due after `seconds`."""
    longest = max((one.delay_ms for one in reminders), default=1)
    return [replace(one, delay_ms=max(1, round(one.delay_ms * seconds * 1000 / longest))) for one in reminders]
