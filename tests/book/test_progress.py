import json
from pathlib import Path

from forge.book.catalog import Entry
from forge.book.progress import Progress, load_progress, next_entry, save_progress, state_file

ENTRIES = tuple(Entry(Path(f"0{number}_{name}.md")) for number, name in ((1, "one"), (2, "two_b"), (3, "three")))


def test_progress_survives(state_home):
    progress = Progress()
    progress.reach("one", 2, 5)
    progress.reach("two-b", 4, 5)
    save_progress(progress)
    assert state_file() == state_home / "forge" / "chapters.json"
    assert load_progress() == Progress({"one": 2}, {"two-b"}, "two-b")


def test_a_finished_chapter_stays_finished_when_it_is_read_again():
    progress = Progress()
    progress.reach("one", 4, 5)
    progress.reach("one", 0, 5)
    assert progress.finished == {"one"} and progress.pages == {"one": 0}


def test_a_damaged_file_counts_as_no_progress():
    state_file().parent.mkdir(parents=True)
    for text in ("", "[]", "{", json.dumps({"pages": 3, "finished": [], "last": None}), "\ud800"):
        state_file().write_bytes(text.encode("utf-8", "surrogatepass"))
        assert load_progress() == Progress()


def test_progress_that_cannot_be_kept_is_no_error(tmp_path, monkeypatch):
    blocking = tmp_path / "file"
    blocking.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocking))
    save_progress(Progress({"one": 2}))
    assert load_progress() == Progress()


def test_a_relative_state_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_file() == tmp_path / ".local" / "state" / "forge" / "chapters.json"


def next_command(progress: Progress) -> str | None:
    found = next_entry(ENTRIES, progress)
    return found and found.command


def test_next_goes_on_where_the_reader_stopped():
    assert next_command(Progress()) == "one"
    assert next_command(Progress({"two-b": 3}, {"one"}, "two-b")) == "two-b"
    assert next_command(Progress({}, {"one"}, "one")) == "two-b"
    assert next_command(Progress({}, {"one", "three"}, "three")) == "two-b"
    assert next_command(Progress({}, {"one", "two-b", "three"}, "three")) is None
    assert next_command(Progress({"one": 1}, {"two-b"}, "two-b")) == "three"
    assert next_command(Progress({}, set(), "gone")) == "one"
