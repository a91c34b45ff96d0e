"""Reports are written whole, through a new file, and follow no link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline.spark.report import write_whole

if TYPE_CHECKING:
    from pathlib import Path


def test_a_report_replaces_a_link_and_keeps_its_target(tmp_path: Path) -> None:
    # Given links to another file, under the report's name and under the one that a part of it had
    other = tmp_path / "other"
    other.write_text("mine")
    for name in ("report.html", ".report.html.part"):
        (tmp_path / name).symlink_to(other)
    # When the report is written
    write_whole(tmp_path / "report.html", "<p>\ud800</p>")
    # Then the other file is as it was
    assert other.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<p>\\ud800</p>"
    assert not (tmp_path / "report.html").is_symlink()


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write_whole(tmp_path / "report.html", "x")
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
