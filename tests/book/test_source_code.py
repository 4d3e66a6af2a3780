import pytest

from forge.book import source_code
from forge.book.source_code import SourceError, Span, excerpt

TEXT = '''"""A module."""


class Outer:
    """A class."""

    @staticmethod
    def method(x):
        total = 0
        for item in x:

            total += item
        return total

    def told():
        """The first.

        The second,
        which is longer.
        """
        return 1


def method():
    pass
'''


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package with one module, in the place of forge."""
    folder = tmp_path / "things" / "inner"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(TEXT)
    monkeypatch.setattr(source_code, "PACKAGE", tmp_path / "things")


def test_a_method_is_found_with_its_decorator_and_without_its_indentation():
    found = excerpt("things.inner.module.Outer.method", light=["total +="])
    assert found.path == "things/inner/module.py" and found.name == "Outer.method" and found.first_line == 7
    assert found.lines[0] == "@staticmethod" and found.lines[-1] == "    return total"
    assert [found.lines[index] for index in found.lit] == ["        total += item"]
    assert not found.elided


def test_an_excerpt_begins_and_ends_where_the_patterns_are():
    span = Span("for item", "total += item", "the beginning")
    found = excerpt("things.inner.module.Outer.method", ["for"], [span])
    assert found.lines == ("… the beginning", "    for item in x:", "", "        total += item", "    … 1 line")
    assert found.elided == {0, 4} and found.lit == {1} and found.first_line == 10


def test_what_lies_between_two_spans_is_left_out_with_a_word():
    spans = [Span(None, "def method"), Span("return total", None, "the sum")]
    found = excerpt("things.inner.module.Outer.method", ["return"], spans)
    assert found.lines == ("@staticmethod", "def method(x):", "    … the sum", "    return total")
    assert found.elided == {2} and found.lit == {3} and found.first_line == 7


def test_of_a_docstring_the_first_paragraph_is_shown():
    found = excerpt("things.inner.module.Outer.told")
    assert found.lines == ("def told():", '    """The first.', "    … 2 lines", '    """', "    return 1")


def test_a_shorter_excerpt_keeps_the_lines_that_matter():
    found = excerpt("things.inner.module.Outer.method", ["return"]).shortened(3)
    assert found.lines == ("@staticmethod", "def method(x):", "    … 3 lines", "    return total")
    assert [found.lines[index] for index in found.lit] == ["    return total"] and found.elided == {2}


def test_a_function_is_not_taken_for_a_method_of_the_same_name():
    assert excerpt("things.inner.module.method").lines == ("def method():", "    pass")


@pytest.mark.parametrize(
    ("dotted", "options", "expected"),
    [
        ("others.inner.module.method", {}, "only source of the package"),
        ("things.inner.nothing.method", {}, "no such module"),
        ("things.inner.module.Outer.missing", {}, "no function or class missing"),
        ("things.inner.module.method", {"light": ["return"]}, "no line that is shown contains 'return'"),
        ("things.inner.module.method", {"spans": [Span("gone")]}, "no line contains 'gone'"),
        ("things.inner.module.Outer.method", {"spans": [Span("return", "for item")]}, "no line contains 'for item'"),
    ],
)
def test_what_is_not_there_is_an_error(dotted, options, expected):
    with pytest.raises(SourceError, match=expected):
        excerpt(dotted, **options)
