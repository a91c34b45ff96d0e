"""The HTML report of a migration."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayline.migration.plan import Plan
    from delayline.migration.run import MigrationResult

REPORT_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Migration {run}</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 50rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}</style></head>
<body><h1>{verdict}</h1><p>Migration {run}, {state}, written {now:%Y-%m-%d %H:%M:%S} UTC.</p>
<h2>Messages</h2>{counts}<h2>Parameters</h2>{parameters}{rejected}</body></html>
"""


def page(plan: Plan, outcome: MigrationResult) -> str:
    """Return the page as HTML, whole, without secrets."""
    progress = outcome.progress
    counts: list[tuple[str, str]] = []
    if progress is not None:
        moved = 0 if plan.target is None else progress.moved
        counts = [("found", str(progress.rows)), ("moved", str(moved)), ("rejected", str(progress.rejected))]
    if outcome.seconds:
        counts.append(("seconds", f"{outcome.seconds:.1f}"))
    if outcome.skipped:
        counts.append(("skipped", str(outcome.skipped)))
    rejected = [(reason, str(number)) for reason, number in outcome.reasons]
    verdict = "Everything has moved" if outcome.complete and plan.target is not None else "Not everything has moved"
    return REPORT_PAGE.format(
        run=escape(outcome.run or "(dry run)"),
        verdict=verdict,
        state=escape(str(outcome.state)),
        now=datetime.now(UTC),
        counts=_table(counts),
        parameters=_table(sorted(plan.parameters.items())),
        rejected="<h2>Not moved, and why</h2>" + _table(rejected) + _table(outcome.examples) if rejected else "",
    )


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f'<tr><td>{escape(name)}</td><td class="number">{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{cells}</table>"
