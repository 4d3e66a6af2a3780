"""What a shell is offered: names of commands, options and values, and where the two options that set it up are."""

import os
import subprocess
import sys

import pytest

from forge.book.catalog import entries
from forge.cli.main import command_named
from forge.cli.options import SHOWABLE
from tests.cli.conftest import ROOT, environment
from tests.cli.test_imports import modules_after
from tests.slow import mostly_slow

HEAVY = ("torch", "numba", "llvmlite", "transformers", "tokenizers")


@pytest.fixture
def offered(monkeypatch, capfd):
    """What bash is offered for the last word of a line; the line may end in a space."""
    from forge.cli.main import main

    def complete(line: str) -> list[str]:
        words = line.split()
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) if line.endswith(" ") else len(words) - 1))
        monkeypatch.setenv("_FORGE_COMPLETE", "complete_bash")
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        return capfd.readouterr().out.split()

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("forge gen", ["generate"]),
        ("forge bench spec", ["speculation"]),
        ("forge generate --max-m", ["--max-model-len"]),
        ("forge generate --kv ", ["off", "basic", "paged", "prefix", "on"]),
        ("forge generate --kv p", ["paged", "prefix"]),
        ("forge generate -m tales-q", ["tales-q8_0", "tales-q4_0"]),
        ("forge generate -m hash", ["hash"]),
        ("forge generate --draft tales-d", ["tales-draft", "tales-draft-q8_0"]),
        ("forge generate --device ", ["cpu", "reference", "cuda"]),
        ("forge generate --kv-dtype bf", ["bfloat16"]),
        ("forge generate --quantize ", ["q8_0"]),
        ("forge generate --speculate ", ["off", "draft", "ngram", "grammar"]),
        ("forge generate --show ", list(SHOWABLE)),
        ("forge trace-scheduler --order ", ["fcfs", "priority", "sjf", "sjf-aged"]),
        ("forge trace-scheduler --preempt ", ["lifo", "lifo-others", "least-progressed"]),
        ("forge generate --evict ", ["lru", "prefix-cost"]),
        ("forge trace-scheduler --preemption ", ["recompute", "swap"]),
        ("forge speculation --speculate ", ["draft", "ngram"]),
        ("forge models inspect tales-q4", ["tales-q4_0"]),
        ("forge chapter pa", ["paged"]),
        ("forge chapter 2", ["2"]),
        ("forge naive --only ", ["run"]),
        ("forge prefix --bug full", ["full-hit"]),
        ("forge generate -m nothing-of-this-name", []),
    ],
)
def test_a_word_is_completed(offered, line, expected):
    assert offered(line) == expected


def test_chapters_are_offered_by_command_and_by_number(offered):
    assert offered("forge chapter ") == [one.command for one in entries()] + [str(one.number) for one in entries()]


def test_pulled_models_are_offered(offered, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "forge" / "models" / "Some" / "Thing-GGUF"
    folder.mkdir(parents=True)
    (folder / "thing-Q8_0.gguf").write_bytes(b"GGUF")

    assert offered("forge generate -m Some/") == ["Some/Thing-GGUF:Q8_0"]


def test_every_option_that_names_a_model_or_a_kind_of_cache_is_completed():
    for command in ("generate", "chat", "compare", "trace-scheduler", "serve", "naive", "paged", "classify"):
        for param in command_named(command).params:
            if param.name in ("model", "kv", "device", "preempt", "order"):
                assert param._custom_shell_complete is not None, f"forge {command} {param.opts[0]}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_can_be_shown(shell):
    code = "from forge.cli.main import run; run()"
    extra = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", shell],
        capture_output=True,
        text=True,
        env=environment(**extra),
        cwd=ROOT,
    )
    assert found.returncode == 0 and "_FORGE_COMPLETE" in found.stdout and found.stderr == ""


def test_it_can_be_installed_for_the_shell_of_a_user(tmp_path):
    extra = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-m", "forge", "--install-completion", "bash"],
        capture_output=True,
        text=True,
        env=environment(**extra),
        cwd=ROOT,
    )
    assert found.returncode == 0 and "bash completion installed" in found.stdout
    assert ".bash_completions/forge.sh" in (tmp_path / ".bashrc").read_text()


def test_the_two_options_are_not_listed_but_named_at_the_end(forge):
    found = forge("--help").out
    assert found.count("--install-completion") == 1 and "--show-completion" not in found
    assert found.index("--install-completion") > found.index("Serve")


@pytest.mark.parametrize(
    "line",
    mostly_slow(
        ["forge generate -m ", "forge generate --kv ", "forge trace-scheduler --preempt "], quick=["forge generate -m "]
    ),
)
def test_completing_loads_nothing_heavy(line):
    setup = (
        "import os; os.environ.update("
        f"COMP_WORDS={line!r}, COMP_CWORD={str(len(line.split()))!r}, _FORGE_COMPLETE='complete_bash')\n"
        "from forge.cli.main import main\n"
        "try:\n    main([])\nexcept SystemExit:\n    pass"
    )
    assert not [name for name in HEAVY if name in modules_after(setup)]
    assert os.environ.get("COMP_WORDS") is None
