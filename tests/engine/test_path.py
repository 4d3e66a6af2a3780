"""How many of the project's functions and files one step runs: what a reader has to follow. Printed, and pinned.

Counted are named functions in forge/, without the model (the hash model stands in for one). A feature that is switched
off must not be on the path.
"""

import dataclasses
import re
import sys
from collections import Counter
from inspect import getsource
from pathlib import Path
from types import CodeType

import pytest

import forge
from forge import LLM, SamplingParams
from forge.cli.main import main
from forge.engine.engine import Engine
from forge.engine.sequence import Sequence

ROOT = str(Path(forge.__file__).parent)
HASH_MODEL = ("model/hash_model.py", "model/model.py")
"""The files of the hash model: its own, and that of the defaults which it inherits."""
LIMITS = {"prefill": (56, 15), "decode": (32, 10), "last step": (52, 12)}
"""Functions and files."""
MORE_FOR_PREFIX = (15, 2)


def functions_of(engine: Engine, step=Engine.step) -> set[CodeType]:
    """The functions that one step runs."""
    seen: set[CodeType] = set()

    def watch(frame, event, argument):
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOT) and not code.co_filename.endswith(HASH_MODEL)
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            seen.add(code)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        step(engine)
    finally:
        sys.setprofile(before)
    return seen


def file_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def path_of(engine: Engine) -> Counter[str]:
    """Functions by file that one step runs."""
    return Counter(map(file_of, functions_of(engine)))


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_a_plain_step_runs_few_functions_in_few_files(kv, capsys):
    llm = LLM("hash", kv=kv)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    llm.engine.add_request("a", [1, 2, 3, 4, 5], params)
    paths = [path_of(llm.engine) for _ in range(6)]

    for name, path in zip(LIMITS, (paths[0], paths[3], paths[5]), strict=True):
        functions, files = LIMITS[name]
        if kv == "prefix":
            functions, files = functions + MORE_FOR_PREFIX[0], files + MORE_FOR_PREFIX[1]
        with capsys.disabled():
            print(f"\n--kv {kv}, {name}: {sum(path.values())} functions, {len(path)} files:", dict(path.most_common()))
        assert sum(path.values()) <= functions, name
        assert len(path) <= files, name


def rows_of_the_readme() -> list[list[str]]:
    """The rows of the reading path's table, each a list of cells."""
    readme = (Path(forge.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("**Follow one token**") :].split("\n\n")[1]
    return [row.split("|")[1:-1] for row in table.splitlines()[2:]]


def listed_in(rows: list[list[str]]) -> dict[str, set[str]]:
    """The files that rows of the reading path list, in order, and the functions named of each. A file without a folder
    stands in the folder of the file before it."""
    files: dict[str, set[str]] = {}
    file = ""
    for name in (name for row in rows for name in re.findall(r"`([^`]+)`", row[0])):
        if name.endswith(".py"):
            file = name.removeprefix("forge/") if "/" in name else str(Path(file).with_name(name))
            files.setdefault(file, set())
        else:
            files[file].add(name)
    return files


def test_the_values_of_the_reading_path_are_classes_of_files_that_it_lists():
    rows = rows_of_the_readme()
    texts = {file: (Path(ROOT) / file).read_text(encoding="utf-8") for file in listed_in(rows)}
    for _, values, _ in rows:
        for name in re.findall(r"`([A-Z][^`]*)`", values):
            assert any(re.search(rf"^class {name}\b", text, re.M) for text in texts.values()), name
        for field in re.findall(r", to `(\w+)`", values):
            assert any(re.search(rf"^    {field}: ", text, re.M) for text in texts.values()), field


def test_a_plain_decode_reads_the_fields_of_a_sequence_that_the_readme_names(monkeypatch):
    (last,) = {last for _, values, _ in rows_of_the_readme() for last in re.findall(r"`Sequence`, to `(\w+)`", values)}
    names = [field.name for field in dataclasses.fields(Sequence)]
    named = names[: names.index(last) + 1]
    read: set[str] = set()

    def watched(sequence: Sequence, name: str):
        read.add(name)
        return object.__getattribute__(sequence, name)

    llm = LLM("hash", kv="paged")
    llm.engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "__getattribute__", watched)
        record = llm.engine.step()
    assert record.phase == "decode"
    assert last in read, "the last field that is read"
    assert read & set(names) <= set(named)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_readme_lists_the_files_that_a_plain_step_of_generate_runs(device, monkeypatch, capsys):
    paths, step = [], Engine.step

    def watched(engine: Engine):
        paths.append(functions_of(engine, lambda engine: records.append(step(engine))))
        return records[-1]

    records: list = []
    monkeypatch.setattr(Engine, "step", watched)
    status = main(["generate", "--kv", "paged", "--device", device, "Once upon a time", "24"])
    assert not status

    decodes = [path for path, record in zip(paths, records, strict=True) if record.phase == "decode"]
    plain = min(decodes, key=len)  # takes no block, and its token has been met before
    takes_block = next(path for path in decodes if "PagedKvCache.grow" in {code.co_qualname for code in path})
    plain |= {code for code in takes_block if file_of(code).startswith("cache/")}
    listed = listed_in(rows_of_the_readme())
    run = {file for file in map(file_of, plain) if not file.startswith("backends/")}
    if device == "reference":  # its operations ask the model for rotary frequencies and the storage for keys
        run -= {"model/config.py", "model/rope.py", "model/backend.py", "cache/kv_storage.py"}
    assert run | {"engine/sequence.py"} == set(listed)  # the step reads a sequence's fields, which is no call
    if device == "cpu":  # which runs the recorded pass, and no function of it
        unnamed = {(file, name) for file, names in listed.items() for name in names}
        lines = 0
        for code in plain:
            names = {(file_of(code), code.co_name), (file_of(code), code.co_qualname)} & unnamed
            num_lines = len(getsource(code).splitlines())
            assert names or num_lines <= 4 or not listed.get(file_of(code)), code.co_qualname
            lines += num_lines if names else 0
            unnamed -= names
        assert not unnamed, "named, and not run"
        with capsys.disabled():
            print(f"\n{lines} lines of named functions")
        assert lines < 450
    assert sum(len((Path(ROOT) / file).read_text(encoding="utf-8").splitlines()) for file in listed) <= 2_000
