"""`forge build` as a reader uses it: in a process of its own, on a pseudo-terminal of 80 x 24 too."""

import json
import os
import subprocess
import sys
import time

import pytest

from forge.exercises import ENTRIES, find_entry, session
from tests.book.terminal import Terminal
from tests.cli.conftest import environment
from tests.cli.conftest import forge as forge  # a fixture
from tests.exercises.mistakes import right, wrong_ones
from tests.waiting import PATIENCE, until


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for exercises, and a reader who has begun nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "exercises"


def write(folder, name, source):
    folder.mkdir(exist_ok=True)
    path = folder / find_entry(name).file_name
    path.write_text(source, encoding="utf-8")
    return path


def test_the_list_says_what_is_done_and_what_comes_next(forge, folder):
    out = forge("build", "--folder", str(folder)).out
    assert all(entry.title in out for entry in ENTRIES)
    assert f"forge build start {ENTRIES[0].number}" in out
    facts = json.loads(forge("build", "--json", "--folder", str(folder)).out)["exercises"]
    assert [entry["passed"] for entry in facts] == [False] * len(ENTRIES)


def test_start_writes_a_file_once(forge, folder):
    assert forge("build", "start", "4", "--folder", str(folder)).status == 0
    path = folder / "04_block_pool.py"
    path.write_text("mine", encoding="utf-8")
    again = forge("build", "start", "4", "--folder", str(folder))
    assert again.status == 2 and "is there already" in again.err
    assert path.read_text(encoding="utf-8") == "mine"


def test_an_unknown_exercise_is_refused(forge, folder):
    found = forge("build", "start", "14", "--folder", str(folder))
    assert found.status == 2 and "there is no exercise 14" in found.err


def test_an_exercise_that_was_not_started_says_how(forge, folder):
    found = forge("build", "check", "4", "--folder", str(folder))
    assert found.status == 2 and "forge build start 4" in found.err


def test_a_check_as_json_and_what_is_remembered_of_it(forge, folder):
    write(folder, "block_pool", right("block_pool"))
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    assert found.status == 0 and json.loads(found.out)["passed"] is True
    assert session.load_builds(folder).passed == {4}
    write(folder, "block_pool", wrong_ones("block_pool")[0].source)
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    facts = json.loads(found.out)
    assert found.status == 1 and facts["rule"] == "enough" and facts["calls"] and facts["question"]
    assert session.load_builds(folder).passed == set()


SILENT = "def propose(self, requests):\n        return [Proposal(()) for _ in requests]\n"
PASTED = {
    "block_pool": wrong_ones("block_pool")[3].source,
    "ngram_proposer": right("ngram_proposer").replace("def propose(self, requests):", SILENT),
}


@pytest.mark.parametrize("name", PASTED)
def test_the_calls_can_be_pasted(folder, name):
    result = session.check(find_entry(name), write(folder, name, PASTED[name]))
    assert not result.passed and len(result.calls) > 2
    done = subprocess.run([sys.executable, "-c", "\n".join(result.calls)], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_check_that_does_not_end_is_stopped(folder, monkeypatch):
    begun, real_wait = folder / "begun", subprocess.Popen.wait
    stubborn = (
        f"open({str(begun)!r}, 'w')\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
    )

    def wait(process, timeout=None):
        if timeout == session.DEADLINE:  # which is over once the reader's code runs
            assert until(begun.exists)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return real_wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(session, "_LAST_WORDS_SECONDS", PATIENCE)
    result = session.check(find_entry("4"), write(folder, "block_pool", stubborn))
    assert result.rule == "endless" and "stopped" in result.found
    assert result.line is not None and result.line.startswith("04_block_pool.py:")


def test_an_exit_in_a_check_is_a_failure_with_its_line(forge, folder):
    write(folder, "block_pool", right("block_pool").replace("return tuple(taken)", "raise SystemExit(0)"))
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    facts = json.loads(found.out)
    assert found.status == 1 and facts["rule"] == "exits" and "raise SystemExit(0)" in facts["line"]


@pytest.mark.parametrize("ends", ["import os; os._exit(0)", "import os; os.abort()"])
def test_a_check_whose_process_ends_is_a_failure(forge, folder, ends):
    write(folder, "block_pool", f"{ends}\n")
    found = forge("build", "check", "4", "--json", "--folder", str(folder))
    assert found.status == 1 and json.loads(found.out)["rule"] == "exits"


def test_a_check_has_a_limit_of_memory_and_of_files(folder):
    hungry = right("block_pool").replace("taken = []", "taken = []; self.log = bytearray(1 << 33)")
    assert session.check(find_entry("4"), write(folder, "block_pool", hungry)).rule == "memory"
    full = 'with open("large", "wb") as file:\n    file.write(bytes(100_000_000))\n'
    result = session.check(find_entry("4"), write(folder, "block_pool", full))
    assert result.rule == "imports" and "large" in result.found


def test_neither_a_thread_nor_a_process_that_goes_on_delays_a_check(folder):
    going_on = "import subprocess, threading, time\nthreading.Thread(target=time.sleep, args=(500,)).start()\n"
    going_on += 'subprocess.Popen(["sleep", "500"])\n'
    started = time.monotonic()
    assert session.check(find_entry("4"), write(folder, "block_pool", going_on + right("block_pool"))).passed
    assert time.monotonic() - started < 400


def test_a_signal_of_the_readers_own_does_not_end_a_check(folder):
    alarm = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    assert session.check(find_entry("4"), write(folder, "block_pool", alarm + right("block_pool"))).passed


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("while True: pass", "it had not returned after"),
        ("raise SystemExit(0)", "it called exit(0)"),
    ],
)
def test_a_run_ends_with_the_readers_line(forge, folder, monkeypatch, broken, words):
    source = right("block_pool").replace("        return tuple(taken)\n", f"        {broken}\n")
    write(folder, "block_pool", source)
    found = forge("build", "run", "4", "--folder", str(folder))
    assert found.status == 1 and words in found.err and "Traceback" not in found.err
    assert "04_block_pool.py:" in found.err


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


def test_hints_that_were_read_are_shown_again(forge, folder):
    hints = find_entry("4").exercise().hints
    for _ in range(2):
        forge("build", "hint", "4")
    again = forge("build", "hint", "4", "--again").out
    assert "hint 1 of" in again and "hint 2 of" in again and "hint 3 of" not in again
    assert f"hint 3 of {len(hints)}" in forge("build", "hint", "4").out


def test_the_progress_of_one_folder_is_not_that_of_another(forge, folder, tmp_path):
    write(folder, "block_pool", right("block_pool"))
    assert forge("build", "check", "4", "--folder", str(folder)).status == 0
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", "block_pool", wrong_ones("block_pool")[0].source)
    assert forge("build", "check", "4", "--folder", str(tmp_path / "other")).status == 1
    assert session.load_builds(folder).passed == {4}


def test_the_same_file_is_found_from_any_directory(forge, folder, tmp_path, monkeypatch):
    write(folder, "block_pool", "mine = 1\n")
    (folder / "notes").mkdir()
    for place in (folder, folder / "notes"):
        monkeypatch.chdir(place)
        found = forge("build", "check", "4", "--json")
        assert json.loads(found.out)["rule"] == "missing", place
    monkeypatch.chdir("/")
    assert json.loads(forge("build", "check", "4", "--json").out)["rule"] == "missing"  # the folder that was used last


def test_options_come_before_or_after_the_subcommand(forge, folder):
    write(folder, "block_pool", "mine = 1\n")
    before = forge("build", "--folder", str(folder), "--json", "check", "4")
    after = forge("build", "check", "4", "--folder", str(folder), "--json")
    assert json.loads(before.out) == json.loads(after.out)


def test_reset_keeps_the_old_file_and_begins_again(forge, folder):
    path = write(folder, "block_pool", right("block_pool"))
    forge("build", "check", "4")
    out = forge("build", "reset", "4").out
    assert "04_block_pool.1.py" in out
    assert path.read_text(encoding="utf-8") == find_entry("4").template.read_text(encoding="utf-8")
    assert (folder / "04_block_pool.1.py").read_text(encoding="utf-8") == right("block_pool")
    assert session.load_builds(folder).passed == set()


def test_a_file_begun_from_another_template_says_so(forge, folder, monkeypatch):
    forge("build", "start", "4", "--folder", str(folder))
    assert "has changed" not in forge("build", "check", "4").out
    monkeypatch.setattr(session, "_fingerprint", lambda text: "another")
    assert "forge build reset 4" in forge("build", "check", "4").out


def test_a_solution_may_import_a_file_beside_it(folder):
    folder.mkdir()
    (folder / "helpers.py").write_text("LIMIT = 3\n", encoding="utf-8")
    path = write(folder, "block_pool", "from helpers import LIMIT\n" + right("block_pool"))
    assert session.check(find_entry("4"), path).passed


def test_functions_are_judged_while_others_are_not_written(forge, folder):
    source = find_entry("sampling").template.read_text(encoding="utf-8")
    source = source.replace('raise NotImplementedError("greedy")', "return int(logits.argmax())")
    write(folder, "sampling", source.replace('raise NotImplementedError("draw")', "return int(token_ids[0])"))
    found = forge("build", "check", "1")
    facts = json.loads(forge("build", "check", "1", "--json").out)
    assert facts["functions"] == {"greedy": "right", "filtered": "not written", "draw": "wrong"}
    assert "✓ right" in found.out and "· not written" in found.out and facts["rule"] == "argmax"


def test_after_passing_the_two_sources_their_costs_and_a_question_are_shown(forge, folder):
    write(folder, "verification", right("verification"))
    assert "? " in forge("build", "check", "9").out
    out = forge("build", "solution", "9").out
    assert "yours" in out and "def kept_length" in out and "forge's own" in out
    assert out.count("times as long") + out.count("the difference is noise") == 3
    assert find_entry("9").exercise().next_question[:30] in out


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_what_a_solution_shows_of_the_engine_fits_a_screen(entry):
    from forge.book.source_code import excerpt

    exercise = entry.exercise()
    assert sum(len(excerpt(dotted).lines) for dotted in exercise.solution) <= 42
    assert exercise.differs and exercise.next_question.endswith("?")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
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


def test_watch_shows_the_broken_rule_on_a_small_terminal(folder):
    write(folder, "block_pool", wrong_ones("block_pool")[5].source + "\nprint(*range(40), sep='\\n')\n")
    with Terminal("build", "watch", "4", "--folder", str(folder), XDG_STATE_HOME=os.environ["XDG_STATE_HOME"]) as shell:
        shell.wait_for("lines more")
        assert "reference count is the number of tables" in shell.page
        assert len(shell.page.rstrip("\n").split("\n")) <= 24
        shell.interrupt()
        shell.finish()
