"""How many of the project's functions and files one step runs: what a reader has to follow. Printed, and pinned.

Counted are named functions in forge/, without the model (the hash model stands in for one). A feature that is switched
off must not be on the path.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

import forge
from forge import LLM, SamplingParams

ROOT = str(Path(forge.__file__).parent)
LIMITS = {"prefill": (60, 15), "decode": (45, 12), "last step": (60, 14)}
"""Functions and files."""
MORE_FOR_PREFIX = (15, 2)


def path_of(llm: LLM) -> Counter[str]:
    """Functions by file that one step runs."""
    seen: set[tuple[str, str]] = set()

    def watch(frame, event, argument):
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOT) and "hash_model" not in code.co_filename
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        llm.engine.step()
    finally:
        sys.setprofile(before)
    return Counter(str(Path(file).relative_to(ROOT)) for file, _ in seen)


@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_a_plain_step_runs_few_functions_in_few_files(kv, capsys):
    llm = LLM("hash", kv=kv)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    llm.engine.add_request("a", [1, 2, 3, 4, 5], params)
    paths = [path_of(llm) for _ in range(6)]

    for name, path in zip(LIMITS, (paths[0], paths[3], paths[5]), strict=True):
        functions, files = LIMITS[name]
        if kv == "prefix":
            functions, files = functions + MORE_FOR_PREFIX[0], files + MORE_FOR_PREFIX[1]
        with capsys.disabled():
            print(f"\n--kv {kv}, {name}: {sum(path.values())} functions, {len(path)} files:", dict(path.most_common()))
        assert sum(path.values()) <= functions, name
        assert len(path) <= files, name
