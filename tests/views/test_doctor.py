import json

from forge.cli.doctor import Finding, is_healthy, screen
from forge.views.json_output import to_json
from forge.views.screen import draw
from tests.views.records import piped, terminal, written

FINE = [Finding("Python", "ok", "3.11"), Finding("cuda", "note", "no GPU")]
BAD = [*FINE, Finding("numba", "trouble", "missing: pip install numba")]


def shown(findings):
    console = piped()
    draw(console, screen(findings))
    return written(console)


def test_a_note_is_no_trouble():
    assert is_healthy(FINE) and not is_healthy(BAD)
    assert "Nothing needs mending" in shown(FINE)


def test_trouble_is_marked_and_counted():
    out = shown(BAD)
    assert "✗" in out and "1 of 3" in out and "pip install numba" in out


def test_a_narrow_terminal_loses_neither_the_mark_nor_the_text():
    console = terminal(20)
    draw(console, screen(BAD))
    out = written(console)
    assert "✗" in out and "missing" in out and "no GPU" in out


def test_the_json_object_has_every_finding():
    assert json.loads(to_json(BAD))[2] == {
        "name": "numba",
        "level": "trouble",
        "text": "missing: pip install numba",
    }
