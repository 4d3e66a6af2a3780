import pytest

from forge.book import source_code
from forge.book.source_code import SourceError, excerpt

TEXT = '''"""A module."""


class Outer:
    """A class."""

    @staticmethod
    def method(x):
        total = 0
        for item in x:

            total += item
        return total


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
    assert not found.cut_before and not found.cut_after


def test_an_excerpt_begins_and_ends_where_the_patterns_are():
    found = excerpt("things.inner.module.Outer.method", ["for"], start="for item", stop="total += item")
    assert found.lines == ("for item in x:", "", "    total += item")
    assert found.cut_before and found.cut_after and found.first_line == 10


def test_a_function_is_not_taken_for_a_method_of_the_same_name():
    assert excerpt("things.inner.module.method").lines == ("def method():", "    pass")


@pytest.mark.parametrize(
    ("dotted", "options", "expected"),
    [
        ("others.inner.module.method", {}, "only source of the package"),
        ("things.inner.nothing.method", {}, "no such module"),
        ("things.inner.module.Outer.missing", {}, "no function or class missing"),
        ("things.inner.module.method", {"light": ["return"]}, "no line that is shown contains 'return'"),
        ("things.inner.module.method", {"start": "return"}, "no line contains 'return'"),
        ("things.inner.module.Outer.method", {"start": "return", "stop": "for item"}, "no line contains 'for item'"),
    ],
)
def test_what_is_not_there_is_an_error(dotted, options, expected):
    with pytest.raises(SourceError, match=expected):
        excerpt(dotted, **options)
