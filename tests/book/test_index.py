"""The table of chapters/README.md lists what belongs to each chapter. One's own chapter may be missing there."""

from chapters.index import HEADING, PAGE, index


def test_the_table_says_where_each_chapters_files_are():
    page = PAGE.read_text(encoding="utf-8")
    rows = page.partition(HEADING)[2].partition("\n\n")[0].splitlines()
    assert len(rows) >= 12
    assert [row for row in rows if row not in index().splitlines()] == [], "python -m chapters.index writes it again"
