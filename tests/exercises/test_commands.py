"""`forge build` as a reader uses it: in a process of its own, on a pseudo-terminal of 80 x 24 too."""

import json
import os
import subprocess
import sys

import pytest

from forge.exercises import session
from forge.exercises.catalog import available, find_entry
from tests.book.terminal import Terminal
from tests.cli.conftest import environment
from tests.cli.conftest import forge as forge  # a fixture
from tests.exercises.mistakes import right, wrong_ones


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for exercises, and a reader who has begun nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "exercises"


def write(folder, name, source):
    folder.mkdir(exist_ok=True)
    path = folder / find_entry(name).file_name
    path.write_text(source, encoding="utf-8")
    return path


def test_the_list_says_what_is_done_and_what_comes_next(forge, folder):
    out = forge("build", "--folder", str(folder)).out
    assert all(entry.title in out for entry in available())
    assert f"forge build start {available()[0].number}" in out
    facts = json.loads(forge("build", "--json", "--folder", str(folder)).out)["exercises"]
    assert [entry["passed"] for entry in facts] == [False] * len(available())


def test_start_writes_a_file_once(forge, folder):
    assert forge("build", "start", "4", "--folder", str(folder)).status == 0
    path = folder / "04_block_pool.py"
    path.write_text("mine", encoding="utf-8")
    again = forge("build", "start", "4", "--folder", str(folder))
    assert again.status == 2 and "is there already" in again.err
    assert path.read_text(encoding="utf-8") == "mine"


def test_an_unknown_exercise_is_refused(forge, folder):
    found = forge("build", "start", "12", "--folder", str(folder))
    assert found.status == 2 and "there is no exercise 12" in found.err


def test_an_exercise_that_was_not_started_says_how(forge, folder):
    found = forge("build", "check", "4", "--folder", str(folder))
    assert found.status == 2 and "forge build start 4" in found.err


def test_a_check_as_json_and_what_is_remembered_of_it(forge, folder):
    write(folder, "block_pool", right("block_pool"))
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    assert found.status == 0 and json.loads(found.out)["passed"] is True
    assert session.load_builds().passed == {4}
    write(folder, "block_pool", wrong_ones("block_pool")[0].source)
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    facts = json.loads(found.out)
    assert found.status == 1 and facts["rule"] == "enough" and facts["calls"] and facts["question"]
    assert session.load_builds().passed == set()


def test_the_calls_can_be_pasted(folder):
    path = write(folder, "block_pool", wrong_ones("block_pool")[3].source)
    result = session.check(find_entry("4"), path)
    done = subprocess.run([sys.executable, "-c", "\n".join(result.calls)], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_check_that_does_not_end_is_stopped(folder):
    stubborn = "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
    result = session.check(find_entry("4"), write(folder, "block_pool", stubborn), deadline=3)
    assert result.rule == "endless" and "stopped" in result.found


def test_a_file_that_cannot_be_imported_shows_its_line(folder):
    result = session.check(find_entry("4"), write(folder, "block_pool", "class MyBlockPool(:\n"))
    assert result.rule == "imports" and result.line == "04_block_pool.py:1: class MyBlockPool(:"
    result = session.check(find_entry("4"), write(folder, "block_pool", "x = 1\n"))
    assert result.rule == "missing" and "MyBlockPool" in result.found


def test_what_the_code_prints_is_shown(folder):
    source = wrong_ones("block_pool")[0].source + '\nprint("hello from mine")\n'
    assert "hello from mine" in session.check(find_entry("4"), write(folder, "block_pool", source)).printed


def test_a_file_checks_itself(folder):
    path = write(folder, "block_pool", find_entry("4").template.read_text(encoding="utf-8"))
    done = subprocess.run([sys.executable, str(path)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and "not written yet" in done.stdout


def test_hints_come_one_further_each_time(forge, folder):
    hints = find_entry("4").exercise().hints
    for number in (*range(1, len(hints) + 1), len(hints)):
        assert f"hint {number} of {len(hints)}" in forge("build", "hint", "4").out


@pytest.mark.parametrize("entry", available(), ids=lambda entry: entry.name)
def test_a_solution_is_the_engines_own_source(forge, entry):
    found = forge("build", "solution", str(entry.number))
    assert found.status == 0 and "forge/" in found.out


def test_the_engine_runs_on_a_right_pool_and_says_the_same(forge, folder):
    write(folder, "block_pool", right("block_pool"))
    found = forge("build", "run", "4", "--json", "--folder", str(folder))
    assert found.status == 0 and json.loads(found.out)["identical"] is True


def test_a_run_on_broken_code_names_the_line(forge, folder):
    write(folder, "block_pool", find_entry("4").template.read_text(encoding="utf-8"))
    found = forge("build", "run", "4", "--folder", str(folder))
    assert found.status == 1 and "04_block_pool.py" in found.err and "Traceback" not in found.err


def test_every_line_of_a_message_fits_a_terminal_of_80_columns(folder):
    write(folder, "block_pool", wrong_ones("block_pool")[5].source)
    with Terminal("build", "check", "4", "--folder", str(folder), XDG_STATE_HOME=os.environ["XDG_STATE_HOME"]) as shell:
        shell.wait_for("forge build hint 4")
        assert shell.finish() == 1
        assert max(map(len, shell.page.split("\n"))) <= 80
        assert "reference count is the number of tables" in shell.page


def test_watch_checks_again_when_the_file_is_saved(folder):
    path = write(folder, "block_pool", wrong_ones("block_pool")[0].source)
    with Terminal("build", "watch", "4", "--folder", str(folder), XDG_STATE_HOME=os.environ["XDG_STATE_HOME"]) as shell:
        shell.wait_for("✗")
        path.write_text(right("block_pool"), encoding="utf-8")
        shell.wait_for("it keeps all its promises")
        shell.interrupt()
        assert shell.finish() == 130 and shell.is_sane()
