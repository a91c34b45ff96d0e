"""Which columns of a table the dashboard leaves out."""

from __future__ import annotations

from delayline.dashboard.tables import full_columns

TABLE = """<table class="stack">
<thead><tr><th scope="col">Name</th><th scope="col">Poller</th><th scope="col" class="n">Lease</th></tr></thead>
<tbody><tr class="x"><th scope="row"><a href="/">a</a></th><td data-label="Poller">{first}</td><td>held</td></tr>
<tr><th scope="row">&lt;td&gt;</th><td data-label="Poller">
  {second}
</td><td>&ndash;</td></tr></tbody></table>"""


def test_a_column_that_is_empty_in_every_row_is_left_out() -> None:
    shown = full_columns(TABLE.format(first="\N{EN DASH}", second=""))
    assert "Poller" not in shown
    assert "Lease" in shown
    assert "held" in shown
    assert "&lt;td&gt;" in shown


def test_a_column_with_a_value_in_a_row_stays() -> None:
    table = TABLE.format(first="\N{EN DASH}", second="0")
    assert full_columns(table) == table


def test_what_counts_as_nothing_may_be_a_word_of_the_table() -> None:
    table = TABLE.format(first="no limit", second="no limit")
    assert full_columns(table) == table
    assert "Poller" not in full_columns(table, "no limit")


def test_a_table_without_rows_and_one_with_a_row_of_a_single_cell_stay_as_they_are() -> None:
    head = "<table><thead><tr><th>Name</th><th>Count</th></tr></thead><tbody></tbody></table>"
    single = head.replace("</tbody>", '<tr><td colspan="2">None.</td></tr></tbody>')
    assert (full_columns(head), full_columns(single), full_columns("")) == (head, single, "")
