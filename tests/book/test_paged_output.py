"""A command's output waits after each screen, and stays as it is otherwise."""

import io

import pytest

from forge.book import pager as module
from forge.book.pager import EnoughRead, PagedOutput, paged_output
from tests.views.records import piped


class Reader:
    """Says yes so many times, then no; keeps how much was written whenever it was asked."""

    def __init__(self, patience: int = 99):
        self.file, self.patience, self.asked = io.StringIO(), patience, []

    def goes_on(self) -> bool:
        self.asked.append(self.file.getvalue().count("\n"))
        self.patience -= 1
        return self.patience >= 0


def test_it_waits_after_each_screen():
    reader = Reader()
    paged = PagedOutput(reader.file, 10, 80, reader.goes_on)
    assert paged.write("line\n" * 5) == 25
    paged.write("line\n" * 20)
    assert reader.asked == [9, 18] and reader.file.getvalue() == "line\n" * 25


def test_a_line_that_is_wider_than_the_screen_takes_several():
    reader = Reader()
    PagedOutput(reader.file, 10, 80, reader.goes_on).write(f"\x1b[1m{'x' * 200}\x1b[0m\n" * 4)
    assert reader.asked == [3]


def test_text_that_streams_is_counted_by_its_lines():
    reader = Reader()
    paged = PagedOutput(reader.file, 4, 80, reader.goes_on)
    for _ in range(8):
        paged.write("a ")
        paged.write("b\n")
    assert reader.asked == [3, 6]


def test_a_view_that_draws_over_itself_does_not_wait():
    reader = Reader()
    paged = PagedOutput(reader.file, 4, 80, reader.goes_on)
    for _ in range(9):
        paged.write("\x1b[2A one\n two\n")
    assert reader.asked == []


def test_who_has_read_enough_ends_the_command():
    reader = Reader(patience=1)
    with pytest.raises(EnoughRead):
        PagedOutput(reader.file, 4, 80, reader.goes_on).write("line\n" * 20)
    assert reader.file.getvalue().count("\n") == 6 and issubclass(EnoughRead, KeyboardInterrupt)


def test_nothing_waits_where_there_is_no_terminal():
    before = module.sys.stdout
    with paged_output(piped(80)):
        assert module.sys.stdout is before
