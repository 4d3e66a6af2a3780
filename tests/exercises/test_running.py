"""Each solution in the engine: the same tokens as the engine's own, and every function of the reader is called."""

import pytest

from forge.exercises import find_entry
from forge.exercises.child import compare
from forge.exercises.session import BrokenRun
from tests.exercises.mistakes import SOLVED, right


def _path(tmp_path, name, source):
    path = tmp_path / find_entry(name).file_name
    path.write_text(source, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("name", SOLVED)
def test_the_engine_runs_on_a_right_solution_and_calls_all_of_it(name, tmp_path):
    comparison = compare(find_entry(name), _path(tmp_path, name, right(name)))
    assert comparison.identical
    assert all(comparison.calls.values()), comparison.calls
    assert comparison.yours.num_tokens > 20


def test_draft_tokens_stand_if_the_readers_code_says_so(tmp_path):
    comparison = compare(find_entry("verification"), _path(tmp_path, "verification", right("verification")))
    cycles = [cycle for record in comparison.yours.records for cycle in record.cycles]
    own = [cycle for record in comparison.reference.records for cycle in record.cycles]
    assert sum(cycle.num_accepted for cycle in cycles) == sum(cycle.num_accepted for cycle in own) > 10


def test_a_wrong_piece_of_the_reader_changes_the_run(tmp_path):
    source = right("verification").replace("emitted.append(argmax[len(draft)])", "emitted.append(argmax[0])")
    assert not compare(find_entry("verification"), _path(tmp_path, "verification", source)).identical


def test_none_from_allocate_is_one_line_about_the_readers_code(tmp_path):
    source = right("block_pool").replace("return tuple(taken)", "return None")
    with pytest.raises(BrokenRun, match="the engine stopped on your code: TypeError"):
        compare(find_entry("block_pool"), _path(tmp_path, "block_pool", source))
