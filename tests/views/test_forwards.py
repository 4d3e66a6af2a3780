from forge.views.forwards import chart_rows, chart_scale, compact_chart, spaced
from tests.views.records import climbing, run_of


def test_a_long_prefill_does_not_flatten_the_decodes():
    forwards = run_of([(500, 300.0), *[(1, 1.0)] * 4]).forwards
    rows = [row.plain for row in chart_rows(forwards, chart_scale(forwards), 80)]
    assert "»" in rows[0] and rows[1].count("█") >= 6


def test_rows_stay_within_their_width():
    forwards = climbing(32).forwards
    for width in (30, 40, 80, 200):
        rows = chart_rows(forwards, chart_scale(forwards), width, lambda forward: "holds 999.9 kB")
        assert max(row.cell_len for row in rows[:3]) <= max(width, 45)


def test_a_compact_chart_keeps_both_ends_and_counts_the_rest():
    rows = [row.plain for row in compact_chart(climbing(32).forwards, 80)]
    assert len(rows) == 8
    assert rows[0].startswith("prefill") and "25 more" in rows[4] and rows[-1].endswith("16.5")
    assert len(compact_chart(climbing(9).forwards, 80)) == 9


def test_spaced_rows_include_the_first_and_the_last():
    picked = spaced(climbing(100).forwards, 12)
    assert len(picked) == 12 and picked[0].number == 1 and picked[-1].number == 100
