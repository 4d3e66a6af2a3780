"""A user's mistake is one line on standard error and an exit status. Never a traceback."""

import io

import numpy as np
import pytest

from forge.cache.factory import KV_MODES
from forge.errors import ForgeError
from forge.model.hash_model import HashModel


def complaint(found):
    """The one line that was complained."""
    assert found.out == ""
    lines = found.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("forge: "), found.err
    return lines[0]


@pytest.mark.parametrize(
    ("args", "status", "expected"),
    [
        (("generate",), 2, "'PROMPT'"),
        (("generate", "x", "many"), 2, "MAX_TOKENS"),
        (("generate", "x", "-5"), 2, "negative"),
        (("generate", "x", "--wrong"), 2, "--wrong"),
        (("generat", "x"), 2, "generat"),
        (("generate", "x", "-m", "tale"), 2, "did you mean tales?"),
        (("generate", "x", "-m", "no/such.gguf"), 2, "no such file"),
        (("generate", "x", "--temperature", "-1"), 2, "temperature"),
        (("generate", "x", "--temperature", "nan"), 2, "temperature"),
        (("generate", "x", "--temperature", "1", "--top-p", "2"), 2, "top_p"),
        (("generate", "x", "0"), 2, "max_tokens is 0"),
        (("generate", "x", "--k", "3"), 2, "give --speculate draft or ngram"),
        (("generate", "x", "--draft", "tales-draft"), 2, "give --speculate draft,"),
        (("models", "inspect"), 2, "'MODEL'"),
        (("models", "inspect", "nothing"), 2, "no such file"),
        (("compare", "x"), 2, "forge compare --kv off vs on"),
        (("compare", "x", "2", "--device", "cpu", "vs", "reference", "--invariant"), 2, "give --device cuda"),
    ],
)
def test_a_mistake_is_one_line(forge, args, status, expected):
    found = forge(*args)
    assert found.status == status and expected in complaint(found)


@pytest.mark.parametrize(
    ("args", "status", "expected"),
    [
        (("",), 2, "prompt is empty"),
        (("x", "--kv", "magic"), 2, "off"),
        (("x", "--device", "toaster"), 2, "cuda"),
        (("x", "--device", "cpu", "--invariant"), 2, "--invariant means nothing with --device cpu"),
        (("x", "--max-model-len", "0"), 2, "--max-model-len"),
        (("x" * 3000,), 2, "context"),
        (("x", "3", "--kv", "paged", "--block-size", "0"), 2, "--block-size"),
        (("x", "3", "--kv", "paged", "--num-blocks", "1000000000"), 2, "4,194,304 is the most"),
        (("\udcff", "3"), 2, "U+DCFF"),
    ],
)
def test_a_mistake_that_only_the_model_can_see(forge, small, args, status, expected):
    found = forge("generate", *small, *args)
    assert found.status == status and expected in complaint(found)


def test_a_model_whose_logits_are_no_numbers_is_one_line(forge, monkeypatch):
    monkeypatch.setattr(
        HashModel, "_logits", lambda model, contexts: np.full((len(contexts), model.vocab_size), np.nan)
    )
    for command in (("generate", "hello", "4"), ("generate", "hello", "1", "--json"), ("score", "hello", "you")):
        found = forge(*command, "-m", "hash")
        assert found.status == 1 and "not finite" in found.err.splitlines()[-1]
        assert "Traceback" not in found.err


def test_json_does_not_turn_an_error_into_json(forge, small):
    assert "prompt is empty" in complaint(forge("generate", "", *small, "--json"))


def test_a_folder_and_a_file_of_another_kind(forge, tmp_path):
    assert "folder" in complaint(forge("generate", "x", "-m", str(tmp_path)))
    other = tmp_path / "notes.gguf"
    other.write_text("not a model")
    found = forge("generate", "x", "-m", str(other))
    assert found.status == 1 and "not a GGUF" in complaint(found)


@pytest.mark.parametrize("args", [("generate", "x", "--kv"), ("compare", "--kv"), ("serve", "--kv")])
def test_an_option_for_the_cache_without_a_kind_lists_the_kinds(forge, args):
    found = forge(*args)
    first, *kinds = found.err.splitlines()
    assert found.status == 2 and found.out == "" and first == "forge: --kv takes one of off, basic, paged, prefix"
    assert [line.split()[0] for line in kinds] == [*KV_MODES]
    assert all(len(line.split()) > 3 for line in kinds)


def test_another_option_without_its_value_is_one_line(forge):
    assert "'--seed' requires" in complaint(forge("generate", "x", "--seed"))
    assert "No such option: --kv" in complaint(forge("models", "--kv"))


def test_spaces_around_a_kind_of_cache_are_nothing(forge, small):
    assert '"kv": "basic"' in forge("generate", "x", "2", *small, "--kv", " basic ", "--json").out
    for nothing in ("", "  "):
        found = forge("generate", "x", "2", *small, "--kv", nothing)
        assert found.status == 2 and "supported: off, basic, paged, prefix" in complaint(found)


@pytest.mark.parametrize("group", [(), ("models",), ("bench",), ("trace",)])
def test_a_group_of_commands_alone_shows_its_help_and_complains_of_nothing(forge, group):
    found = forge(*group)
    assert found.status == 2 and "Usage: forge" in found.out and found.err == ""


def test_escape_codes_in_an_argument_are_not_written_back(forge):
    assert "\x1b" not in complaint(forge("generate", "x", "-m", "\x1b[2Jmodel"))


def test_standard_input_that_is_not_text(forge, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    found = forge("generate", "-")
    assert found.status == 2 and "byte 3" in complaint(found)


def test_the_prompt_may_come_from_standard_input(forge, small, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Once upon")))
    found = forge("generate", "-", "0", "--echo", *small)
    assert found.status == 0 and "Once upon" in found.out


def test_running_out_of_memory_is_said_in_a_line(forge, small, monkeypatch):
    def too_much(*args, **options):
        raise MemoryError

    monkeypatch.setattr("forge.cli.generate.create_llm", too_much)
    found = forge("generate", "x", *small)
    assert found.status == 1 and "out of memory" in complaint(found)


def test_a_bug_keeps_its_traceback(forge, small, monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("forge.cli.generate.create_llm", broken)
    with pytest.raises(ZeroDivisionError):
        forge("generate", "x", *small)


def test_an_error_of_the_library_keeps_its_exit_status(forge, small, monkeypatch):
    class Odd(ForgeError):
        exit_code = 7

    def refuse(*args, **options):
        raise Odd("two\nlines")

    monkeypatch.setattr("forge.cli.generate.create_llm", refuse)
    found = forge("generate", "x", *small)
    assert found.status == 7 and complaint(found) == "forge: two lines"


@pytest.mark.parametrize(
    "arguments",
    [
        ("prefix", "--model", "nope"),
        ("naive", ""),
        ("batching", "--requests", "0"),
        ("speculation", "--k", "0"),
        ("classify", "--labels", "happy,sad", ""),
    ],
)
def test_a_mistake_is_refused_before_a_page_or_an_answer_is_shown(forge, arguments):
    found = forge(*arguments)
    assert (found.status, found.out) == (2, "") and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("naive", "x", "5", "--device", "toaster"), "unknown device 'toaster'"),
        (("naive", "x", "0"), "max_tokens must be at least 1"),
        (("kernels", "--threads", "0"), "--threads must be a whole number of at least 1"),
        (("paged", "--num-blocks", "0"), "--num-blocks must be a whole number of at least 1"),
        (("prefix", "--block-size", "0"), "--block-size must be a whole number of at least 1"),
        (("batching", "--max-tokens", "x:y"), "--max-tokens is a number of tokens or two of them"),
        (("batching", "--prompt-tokens", "9:3"), "--prompt-tokens 9:3"),
        (("batching", "--budgets", "x"), "--budgets takes numbers from 1 with commas"),
        (("prefix", "--branches", "-1"), "--branches is at least 0"),
        (("cluster", "--replicas", "0"), "--replicas is at least 1"),
        (("cluster", "--router", "nosuch"), "unknown router 'nosuch'"),
        (("cluster", "--part", "nosuch"), "Invalid value for '--part': 'nosuch' is not one of"),
        (("kernels", "--type", "Q3_K"), "Q3_K"),
        (("kernels", "--model", "nothing"), "nothing"),
        (("speculation", "--draft", "no.gguf"), "no.gguf: no such file"),
        (("speculation", "--speculate", "medusa"), "unknown --speculate 'medusa'"),
        (("speculation", "--temperature", "-1"), "temperature must not be negative"),
        (("oneshot", "--kv", "magic"), "unknown kv mode 'magic'"),
        (("serving", "--max-num-seqs", "0"), "--max-num-seqs must be a whole number of at least 1"),
        (("cuda", "--kernels", "none"), "unknown kernels 'none'"),
        (("cuda", "--only", "run", "--kernels", "none"), "unknown kernels 'none'"),
    ],
)
def test_a_chapter_refuses_a_mistake_before_its_first_page(forge, args, expected):
    found = forge(*args)
    assert found.status == 2 and expected in complaint(found) and found.out == ""
