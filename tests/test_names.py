"""One concept, one name: words that were retired stand nowhere, and a local says what it holds."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import forge
from forge.engine.policies import SchedulerConfig
from forge.engine_args import EngineArgs

ROOT = Path(forge.__file__).parent
CHAPTERS = ROOT.parent / "chapters"
MOST_VAGUE = 120
VAGUE = {
    "one",
    "ones",
    "found",
    "made",
    "said",
    "each",
    "own",
    "other",
    "others",
    "what",
    "marks",
    "thing",
    "things",
    "given",
    "wanted",
}
"""Names of locals and parameters that say nothing about what they hold."""

RETIRED = {
    "prefill-only": r"one_?shot",
    "draft token": r"guess(es|ed|ing)?",
    "sample": r"forked(_from)?",
    "draft": r".*(logits|argmax)_of_runs?|verify_runs",
    "preempt (the policy), preemption (recompute or swap)": r"victim_name|preempt(ion)?_mode",
    "subscriber": r".*(watcher|observer|follower)s?",
}
"""From a concept's name to the identifiers that it had before, as a pattern of the whole name in lower case."""
AS_THEY_STAND = {
    ("experiments/oneshot.py", "oneshot"),  # the chapter's command
    ("bench/oneshot.py", "bench_oneshot"),
    ("views/chat.py", "forked"),  # /fork
    ("cli/chat.py", "forked"),
}
GUESSES_OF_READERS = ("book/", "cli/chapters.py")
"""A chapter asks its reader for a guess."""

RETIRED_IN_TEXTS = {
    "draft token, proposal, drafted": (
        r"\bguess(es|ed|ing)?\b",
        r"^7\. Guess, verify, keep what agrees|(?-i:\bGuess[.;]|is a \*guess\*|The defaults are guesses)",
    ),
    "prefill-only": (r"\bone-shots?\b", r"Prelude calls it OneShot"),
}
"""From a concept's name to words that no screen, help text, docstring or exercise has, and to the lines that may: a
chapter's title, and constants that no GPU has measured."""

RETIRED_IN_CHAPTERS = {
    "prefill-only": (
        r"\bone-?shots?\b",
        r"Prelude calls it OneShot|one-shot prompting|^.*\bforge\b.*\boneshot\b|prefill-only, oneshot|^  OneShot",
    ),
    "subscriber": (r"\b(observers?|watchers?)\b", r"^$"),
    "--preemption": (r"--mode\b|--victim\b", r"^$"),
}
"""From a concept's name to the words before, and to the lines that may have them."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in ("id", "arg", "attr", "name", "asname"):
            if isinstance(identifier := getattr(node, name, None), str):
                yield identifier


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return dict(sources())


@pytest.fixture(scope="module")
def names(trees) -> dict[str, set[str]]:
    """The identifiers of each file."""
    return {path: set(identifiers(tree)) for path, tree in trees.items()}


@pytest.mark.parametrize("concept", RETIRED)
def test_a_retired_word_is_no_identifier(concept, names):
    former = re.compile(RETIRED[concept])
    standing = {(path, name) for path in names for name in names[path] if former.fullmatch(name.strip("_").lower())}
    standing = {
        (path, name)
        for path, name in standing
        if "guess" not in name.lower() or not path.startswith(GUESSES_OF_READERS)
    }
    assert standing - AS_THEY_STAND == set()


@pytest.mark.parametrize("concept", RETIRED_IN_TEXTS)
def test_a_retired_word_is_on_no_screen_and_in_no_help(concept):
    former, allowed = (re.compile(pattern, re.IGNORECASE) for pattern in RETIRED_IN_TEXTS[concept])
    standing = [
        f"{name}:{number}: {line}"
        for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.toml")])
        if not (name := path.relative_to(ROOT).as_posix()).startswith(GUESSES_OF_READERS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if former.search(line) and not allowed.search(line.strip().removeprefix('"""'))
    ]
    assert standing == []


@pytest.mark.parametrize("concept", RETIRED_IN_CHAPTERS)
def test_a_retired_word_is_not_in_a_chapter(concept):
    former, allowed = (re.compile(pattern, re.IGNORECASE) for pattern in RETIRED_IN_CHAPTERS[concept])
    standing = [
        f"{path.relative_to(CHAPTERS)}:{number}: {line}"
        for path in sorted(CHAPTERS.rglob("*.md"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if former.search(line) and not allowed.search(line)
    ]
    assert standing == []


def test_locals_say_what_they_hold(trees):
    vague: Counter[str] = Counter()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            is_local = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
            vague[path] += is_local or (isinstance(node, ast.arg) and node.arg in VAGUE)
    assert vague.total() <= MOST_VAGUE, vague.most_common(8)


def test_only_the_loader_loads_a_model(trees):
    """What assembles an `LLM` is `create_llm`."""
    defining = {
        path
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "load_model"
    }
    assert defining == {"model/loader.py"}


def test_an_option_of_the_scheduler_has_one_name():
    assert {field.name for field in fields(SchedulerConfig)} <= {field.name for field in fields(EngineArgs)}
