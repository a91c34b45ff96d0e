"""The database object of an SQLite file, as the file database that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.sql.databases import database_at
from delayline.sql.file_database import FileDatabase

if TYPE_CHECKING:
    from pathlib import Path


def database_of(file: Path, options: str = "") -> FileDatabase:
    """Return this process's database for the file."""
    database = database_at(f"sqlite:///{file}{options}")
    assert isinstance(database, FileDatabase)
    return database
