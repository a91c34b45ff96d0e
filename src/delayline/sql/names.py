"""How long a table's name may be."""

from __future__ import annotations

from delayline.errors import ConfigurationError


def must_fit(table: str, length: int, longest: int, unit: str, place: object) -> None:
    """Raise ConfigurationError for a table's name that the database would cut or refuse."""
    if length > longest:
        raise ConfigurationError(
            f"the table name {table!r} is longer than the {longest} {unit} that {place} allows: "
            "give the endpoint a shorter name, or the store a table_name"
        )
