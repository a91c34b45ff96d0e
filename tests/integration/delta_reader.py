"""What DuckDB reads from a Delta table; its extension comes from PyPI, so that no test has to download it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import duckdb
import duckdb_extension_delta

[_EXTENSION] = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
EXTENSION: Final = str(_EXTENSION)


def ids_in_table(folder: Path | str, where: str = "true") -> list[str]:
    """Return the ids of the messages in the table."""
    with duckdb.connect() as connection:
        connection.load_extension(EXTENSION)
        query = f"SELECT id FROM delta_scan('{folder}') WHERE {where} ORDER BY id"  # noqa: S608 - of the tests alone
        return [key for (key,) in connection.execute(query).fetchall()]
