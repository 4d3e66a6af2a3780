"""The pager with keys from a list: which page is shown, and what each key does."""

import re
from contextlib import contextmanager, nullcontext

import pytest
from rich.text import Text

from forge.book import pager
from forge.book.catalog import Entry
from forge.book.chapter import parse_chapter
from forge.book.pager import Pager, on_screens, split_paragraphs
from forge.book.progress import Progress, load_progress, save_progress
from forge.book.session import Session
from forge.errors import UsageError
from forge.views.keys import EOF, RESIZE
from forge.views.screen import Report
from tests.views.records import terminal, written

TEXT = """# 1 · T

Page one.

## Two

```forge predict
How long?

answer: {{a.ms:.0f}}
why: Because.
```

```forge run a
forge naive --only run
```

It took {{a.ms:.0f}} ms.

## Four

The end.
"""


class FakeKeys:
    single = True

    def __init__(self, keys):
        self.keys = list(keys)
        self.is_muted = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def read_key(self, timeout=None):
        key = self.keys.pop(0) if self.keys else EOF
        if isinstance(key, BaseException):
            raise key
        return key

    def paused(self):
        return nullcontext()

    @contextmanager
    def muted(self):
        self.is_muted = True
        yield
        self.is_muted = False


class Reader:
    """Reads the chapter with given keys; keeps what was run and every page as it was shown."""

    def __init__(self, monkeypatch, tmp_path):
        self._monkeypatch = monkeypatch
        self.entry = Entry(tmp_path / "01_naive.md")
        self.entry.path.write_text(TEXT)
        self.commands: list[str] = []
        self.shell_lines: list[str] = []
        self.lines: list[str] = []
        self.progress = Progress()

    def run_command(self, command: str) -> Report:
        self.commands.append(command)
        self.was_muted = self.keys.is_muted
        if "wrong" in command:
            raise UsageError("no such option")
        return Report({"ms": 7.0 * len(self.commands)}, lambda console: console.print(Text("the report")))

    def read(self, *keys, page: int = 0, height: int = 24, resumes: bool = False, text: str = TEXT) -> list[str]:
        """The pages that were shown, without escape codes."""
        if resumes:
            self.progress = load_progress()
        opened = self._open(keys, height, text)
        if resumes:
            opened.resume()
        self.status = opened.read(page)
        return self._screens()

    def choose(self, *keys, given: str | None = None) -> list[str]:
        """The pages that a reader sees who names the chapter again, after the page that asks where to begin."""
        self.progress = load_progress()
        opened = self._open(keys, 24, TEXT)
        if given is not None:
            self.session.commands = dict.fromkeys(self.session.chapter.runs(), given)
        page = opened.choose_page(self.progress.pages["naive"])
        if page is not None:
            opened.read(page)
        return self._screens()

    def _open(self, keys, height: int, text: str) -> Pager:
        self._console, self.keys = terminal(80, height), FakeKeys(keys)
        self._monkeypatch.setattr(pager, "open_keys", lambda console: self.keys)
        self._monkeypatch.setattr(pager, "read_line", lambda prompt, prefill="": self.lines.pop(0))
        self.session = Session(parse_chapter(text), self.run_command)
        return Pager(self._console, self.entry, self.session, self.progress, self.shell_lines.append)

    def _screens(self) -> list[str]:
        console = self._console
        screens = re.split(r"\x1b\[H\x1b\[2J|\x1b\[2J\x1b\[H", written(console))
        return [re.sub(r"\x1b\[[0-9;]*m", "", screen).strip("\n") for screen in screens if screen]


@pytest.fixture
def reader(monkeypatch, tmp_path) -> Reader:
    return Reader(monkeypatch, tmp_path)


def places(pages: list[str]) -> list[str]:
    return [re.search(r"(\d) / 5 ──", page)[1] for page in pages]


def test_next_and_back(reader):
    assert places(reader.read("n", "b", "enter", "left", "q")) == ["1", "2", "1", "2", "1"]


def test_back_on_the_first_page_stays(reader):
    assert places(reader.read("b", "q")) == ["1", "1"]


def test_a_page_has_its_title_its_text_and_its_keys(reader):
    page = reader.read("q")[0]
    assert page.startswith("── 1 · T ───") and "Page one." in page
    assert page.endswith("[n]ext  [b]ack  [:] command  [:?WORD] glossary  [?] keys  [q]uit")


def test_going_past_the_last_page_ends_the_chapter(reader):
    pages = reader.read("n", "n", "n", "n", "n", "n", page=1)
    assert places(pages) == ["2", "2", "3", "3", "4", "5"] and "[n] ends the chapter" in pages[-1]
    assert reader.status == 0 and load_progress().finished == {"naive"}


def test_a_guess_is_typed_and_held_against_what_was_measured(reader):
    pages = reader.read("n", "4", "backspace", "1", "4", "enter", "q")
    assert "Your guess: ▌" in pages[1] and "Your guess: 14▌" in pages[5]
    assert (
        "How long?\nYou said 14. It is 7: your guess was too high by a factor of 2.0." in pages[-1]
        and "It took 7 ms." in pages[-1]
    )


def test_an_answer_that_is_none_is_asked_for_again(reader):
    pages = reader.read("n", "-", "enter", "7", "enter", "q")
    assert "That should be a number. Your guess: ▌" in pages[3]
    assert "That should be" not in pages[4] and "You said 7. It is 7: your guess was exact." in pages[-1]


CHOICES = """# 1 · T

```forge predict
Which?

- this one, if a.ms > 100
- that one, otherwise
```

```forge predict
How long?

answer: {{a.ms:.0f}}
```

```forge run a
forge naive --only run
```
"""


def test_a_choice_waits_for_enter_so_the_next_question_is_asked_too(reader):
    _, typed, second, *_ = reader.read("2", "enter", "7", "enter", "q", text=CHOICES)
    assert "Your guess: 2▌" in typed and "[Enter] answers" in typed and "Which?" in typed
    assert "How long?" in second and "Your guess: ▌" in second
    assert [guess.text for guess in reader.session.guesses.values()] == ["2", "7"]


@pytest.mark.parametrize("key", ["n", "enter", "space", "right"])
def test_a_key_that_would_pass_a_question_is_asked_back_once(reader, key):
    asked, asked_back, passed, *_ = reader.read(key, key, "q", text=CHOICES)
    assert "Which?" in asked and "Which?" in asked_back and "the same key again goes on without one" in asked_back
    assert "How long?" in passed and "goes on without one" not in passed


def test_another_key_in_between_asks_again(reader):
    pages = reader.read("n", "escape", "n", "q", text=CHOICES)
    assert all("Which?" in page for page in pages)


@pytest.mark.parametrize("key", ["?", "h"])
def test_the_keys_are_listed(reader, key):
    page = reader.read(key, "x", "q")[1]
    assert ":?WORD" in page and "quit; forge next goes on at this page" in page


def test_a_reader_who_names_a_chapter_is_asked_whether_to_go_on(reader):
    reader.read("n", "7", "enter", "q")
    asked, page = reader.choose("n", "q")
    assert "You left this chapter on page 3 of 5." in asked and places([page]) == ["3"] and "You said 7." in page
    assert reader.commands == ["forge naive --only run"], "what the session before measured is still there"
    assert places(reader.choose("x", "b", "q")[1:]) == ["1"]
    assert len(reader.choose("q")) == 1 and load_progress().pages == {"naive": 0}


def test_other_options_than_before_run_again(reader):
    reader.read("n", "7", "enter", "q")
    reader.choose("n", "q", given="forge naive --only run -m other")
    assert reader.commands == ["forge naive --only run", "forge naive --only run -m other"]


def test_passing_gives_the_answer_without_a_guess(reader):
    assert "It is 7.\nBecause." in reader.read("n", "enter", "enter", "q")[-1]


def test_an_answered_question_can_be_looked_at_again(reader):
    page = reader.read("n", "7", "enter", "b", "q")[-1]
    assert "You said 7." in page and "Your guess" not in page


def test_a_run_happens_once_and_what_is_typed_meanwhile_is_not_echoed(reader):
    reader.read("n", "n", "n", "n", "b", "n", "b", "q")
    assert reader.was_muted
    assert reader.commands == ["forge naive --only run"]


def test_a_page_in_the_middle_runs_what_it_needs_first(reader):
    reader.read("b", "q", page=3)
    assert reader.commands == ["forge naive --only run"]


def test_again_with_other_options(reader):
    reader.lines = ["forge naive --only run 64"]
    pages = reader.read("a", "q", page=2)
    assert reader.commands == ["forge naive --only run", "forge naive --only run 64"]
    assert "It took 14 ms." in pages[-1] and "$ forge naive --only run 64" in pages[-1]


def test_again_with_options_that_are_wrong_keeps_what_was_measured(reader):
    reader.lines = ["forge naive wrong"]
    pages = reader.read("a", "x", "q", page=2)
    assert "no such option" in pages[-2] and "It took 7 ms." in pages[-1]
    assert "$ forge naive --only run\n" in pages[-1]


@pytest.mark.parametrize("line", ["", "  ", None])
def test_again_with_nothing_runs_nothing(reader, line):
    reader.lines = [line]
    reader.read("a", "q", page=2)
    assert len(reader.commands) == 1


def test_a_command_of_ones_own(reader):
    reader.lines = ["generate x", ""]
    reader.read(":", "x", ":", "q")
    assert reader.shell_lines == ["generate x"]


def test_a_term_is_looked_up(reader):
    reader.lines = ["?KV cache", "forge ?prefill"]
    reader.read(":", "x", ":", "q")
    assert reader.shell_lines == ["glossary 'KV cache'", "glossary prefill"]


def test_the_last_page_has_the_score_and_where_to_go_on(reader):
    page = reader.read("n", "7", "enter", "n", "n", "q")[-1]
    assert "Your predictions: 1 of 1 right, or within a factor of 1.5." in page
    assert "Your predictions" not in reader.read("n", "enter", "enter", "n", "n", "q")[-1]


def test_a_session_goes_on_without_running_anything_again(reader):
    before = reader.read("n", "7", "enter", "q")[-1]
    again = reader.read("q", page=2, resumes=True)[-1]
    assert again == before and "the report" in again and "You said 7." in again
    assert reader.commands == ["forge naive --only run"]
    reader.entry.path.write_text(TEXT + "More.\n")
    reader.read("q", page=2, resumes=True)
    assert len(reader.commands) == 2


def test_a_session_that_cannot_be_read_begins_anew(reader):
    reader.read("n", "n", "n", "q")
    reader.progress.session = {**reader.progress.session, "runs": [{"command": "forge naive --only run"}]}
    save_progress(reader.progress)
    reader.read("q", page=2, resumes=True)
    assert len(reader.commands) == 2


def test_a_resize_draws_the_page_again(reader):
    pages = reader.read(RESIZE, RESIZE, "q")
    assert len(pages) == 3 and len(set(pages)) == 1


def test_keys_that_mean_nothing_do_nothing(reader):
    assert places(reader.read("x", "a", "tab", "escape", "q")) == ["1"] * 5


def test_the_end_of_input_ends_the_reading(reader):
    assert places(reader.read("n")) == ["1", "2"]
    assert load_progress().pages == {"naive": 1} and load_progress().last == "naive"


def test_ctrl_c_is_handed_on(reader):
    with pytest.raises(KeyboardInterrupt):
        reader.read("n", KeyboardInterrupt())
    assert load_progress().pages == {"naive": 1}


def test_a_page_higher_than_the_screen_is_shown_in_parts(reader):
    _, first, second, last, *back = reader.read("n", "n", "b", "b", "q", page=2, height=9)
    assert "the report" in first and "It is 7." not in first and "[n]ext (more)" in first
    assert "the report" not in second and "It took 7 ms." in second and "(more)" not in second
    assert places([first, second, last]) == ["3", "3", "4"] and back == [second, first]
    assert all(len(page.splitlines()) <= 9 for page in (first, second, last))


def screens(lines, most):
    return on_screens(split_paragraphs(lines), most)


def test_lines_are_cut_where_one_is_empty():
    lines = ["a", "b", "", "c", "d", "", "e"]
    assert screens(lines, 7) == [lines]
    assert screens(lines, 6) == [["a", "b", "", "c", "d"], ["e"]]
    assert screens(lines, 4) == [["a", "b"], ["c", "d", "", "e"]]
    assert screens(list("abcdefg"), 3) == [list("abc"), list("def"), ["g"]]
    assert screens([], 5) == [[]]


def test_a_block_that_fits_a_screen_is_not_cut():
    lines = ["a", "", *["x"] * 5]
    assert screens(lines, 5) == [["a"], ["x"] * 5]
    assert screens(["a", "\x1b[1m \x1b[0m", *["x"] * 5], 5) == [["a"], ["x"] * 5]


def test_a_heading_stays_with_its_text():
    assert screens(["a", "b", "", "Heading", "───────", "", "c"], 6) == [["a", "b"], ["Heading", "───────", "", "c"]]
