"""Tables without the columns that say nothing."""

from __future__ import annotations

import re
from typing import Final

from markupsafe import Markup

#: What a cell shows where there is nothing to show.
NOTHING: Final = frozenset({"", "-", "\N{EN DASH}"})
#: Rows and cells of the templates' own tables: text in them is escaped, and no table is within another.
_ROW: Final = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL: Final = re.compile(r"<(t[hd])\b[^>]*>(.*?)</\1>", re.DOTALL)


def full_columns(table: str, nothing: str = "") -> Markup:
    """Return a table without the columns in which no row has anything. The first column stays.

    Args:
        table: Its HTML, of a template.
        nothing: Another text that cells have where there is nothing.
    """
    head, *rows = [[cell[2].strip() for cell in _CELL.finditer(row)] for row in _ROW.findall(table)] or [[]]
    empty = {
        place
        for place in range(1, len(head))
        if rows and all(len(row) == len(head) and row[place] in NOTHING | {nothing} for row in rows)
    }

    def without(row: re.Match[str]) -> str:
        places = iter(range(len(head)))
        return _CELL.sub(lambda cell: "" if next(places, None) in empty else cell[0], row[0])

    return Markup(_ROW.sub(without, table) if empty else table)  # noqa: S704 - a part of the template's own HTML
