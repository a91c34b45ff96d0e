"""How late messages were: percentiles and a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from delayline.cli.screen import bar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Upper ends of the histogram's bars in milliseconds; the last bar has none.
EDGES: Final = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of messages, in milliseconds."""

    messages: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def lateness_of(milliseconds: Sequence[float]) -> Lateness:
    """Return the percentiles (nearest rank) of latenesses; zeros where there are none."""
    ordered = sorted(milliseconds)
    if not ordered:
        return Lateness(0, 0.0, 0.0, 0.0)

    def rank(percent: int) -> float:
        return round(ordered[-(-percent * len(ordered) // 100) - 1], 1)

    return Lateness(len(ordered), rank(50), rank(99), round(ordered[-1], 1))


def histogram(milliseconds: Sequence[float]) -> list[tuple[str, int]]:
    """Return how many messages fell between the edges, with a label for each bar; empty bars at the ends left out."""
    counts = [0] * (len(EDGES) + 1)
    for value in milliseconds:
        counts[next((place for place, edge in enumerate(EDGES) if value < edge), len(EDGES))] += 1
    labels = [
        f"< {span(EDGES[0])}",
        *(f"{span(low)} to {span(high)}" for low, high in pairwise(EDGES)),
    ]
    labels.append(f"> {span(EDGES[-1])}")
    filled = [place for place, count in enumerate(counts) if count]
    return [(labels[place], counts[place]) for place in range(filled[0], filled[-1] + 1)] if filled else []


def as_text(bars: Sequence[tuple[str, int]]) -> list[str]:
    """Return the histogram as lines that line up."""
    largest = max((count for _, count in bars), default=0)
    width = max((len(label) for label, _ in bars), default=0)
    return [f"{label:>{width}}  {count:>7,}  {bar(count, largest, 40)}".rstrip() for label, count in bars]


def span(milliseconds: float) -> str:
    """Return milliseconds as people write them: 20 ms, 1.5 s."""
    if milliseconds < 1000:
        return f"{milliseconds:g} ms"
    return f"{milliseconds / 1000:g} s"


def draw(outside: Sequence[float], touched: Sequence[float], path: Path) -> None:
    """Write the histogram as a PNG, messages that the outage touched in a colour of their own.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    smallest = max(0.1, min([*outside, *touched], default=0.1))
    largest = max([*outside, *touched, smallest * 2])
    ratio = (largest / smallest) ** (1 / 60)
    edges = [smallest * ratio**step for step in range(61)]
    axes.hist(
        [[max(value, smallest) for value in outside], [max(value, smallest) for value in touched]],
        bins=edges,
        stacked=True,
        label=[f"dispatcher running ({len(outside):,})", f"outage and its backlog ({len(touched):,})"],
        color=["#2a6f97", "#e07a5f"],
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: span(value))
    axes.set_xlabel("lateness: handled minus due")
    axes.set_ylabel("messages")
    axes.set_title(f"{len(outside) + len(touched):,} delayed messages, dispatcher killed half way")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
