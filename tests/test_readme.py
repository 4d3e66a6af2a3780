"""The README and chapters/reference/: everything that a reader is told to type works, and what they show is so.

Every line of a shell block is run as it stands, but for options of `SHORTER` where a measurement would take minutes; or
it is run elsewhere, as `RUN_BY` says. What is neither fails. The commands of a page are run in order in one folder,
since one writes what the next reads.
"""

import importlib.metadata
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forge.backends.cpu.compilation import cache_folder
from forge.book.catalog import entries
from forge.cli.compare import DIFFERENT
from forge.cli.main import command_named, main
from forge.model.catalog import models_folder
from tests.book.terminal import Terminal
from tests.cli.conftest import ROOT
from tests.cli.test_makefile import dry_run
from tests.model.fake_hub import FakeHub, running
from tests.reference_claims import CLAIMS, EXEMPT
from tests.server.conftest import Server
from tests.tokenizer.conftest import document  # noqa: F401 (a fixture)

BOOK = ROOT / "chapters"
PAGES = (ROOT / "README.md", *sorted((BOOK / "reference").glob("*.md")))
README = PAGES[0].read_text(encoding="utf-8")
EXTENDING = (BOOK / "reference" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = {path: path.read_text(encoding="utf-8") for path in sorted((BOOK / "examples").glob("*.py"))}
PICTURES = BOOK / "pictures"
CHAPTERS = {f"forge {entry.command}" for entry in entries()}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 120
"""A shell line that is longer makes a reader scroll sideways."""

SHORTER = {
    "forge compare --device reference vs cpu": "Once 4",
    "forge compare --batch 1 vs 16": "--requests 8",
    "forge next": "--no-pause",
    "forge compare --class generation vs prefill-only --requests 64": "--requests 8",
    "forge oneshot": "--only run --requests 2",
    "forge naive --model Qwen/Qwen3-0.6B-GGUF:Q8_0": "Once 8 --only run",
    "forge models synth qwen3-0.6b --type Q8_0 --out a.gguf": "--layers 1 --vocab 400",
    "forge models synth qwen3-0.6b --type Q8_0 --out qwen3-0.6b-q8_0.gguf": "--layers 1 --vocab 400",
    "forge bench cpu -m qwen3-0.6b-q8_0.gguf": "--quick --peer none --only decode1",
    "forge bench engine --requests 64": "--requests 4 --reps 1 --batch 4 --max-tokens 8",
    "forge cluster --only run --part failure": "--part apart",
    "forge cluster --only run --part measured": "--part apart",
    "forge bench cache": "--quick --length 32",
    "forge bench speculation": "--quick --tokens 8 --k 2 --batch 1 --speculate ngram",
    "forge bench oneshot -m hash": "--reps 1 --requests 4 --concurrency 2 --only sweep",
    "forge bench prefix-planning": "--requests 2 --rubric-tokens 32 --reps 1",
    "forge bench serve --concurrency 64": "--concurrency 4 --num-prompts 4 --output-tokens 4 --url {url}",
    "forge bench serve --concurrency 4 --num-prompts 400 --input-tokens 128 --output-tokens 32 --json": (
        "--num-prompts 4 --input-tokens 16 --output-tokens 4 --url {url}"
    ),
    "forge bench serve --concurrency 16 --peer http://127.0.0.1:8081": (
        "--concurrency 2 --num-prompts 4 --input-tokens 16 --output-tokens 4 --url {url} --peer {url}"
    ),
}
"""A line → what is added to it. Of an option that is given twice the last counts."""

SERVED, CLUSTER = "tests/server/test_lifecycle.py", "tests/cluster/test_serve.py"
OPERATING = "tests/server/test_operating_page.py"
ENGINES_CHANGE = "test_engines_come_and_go_and_a_model_that_does_not_fit_is_refused_while_streams_run"
UPDATE = "test_an_update_to_another_file_fails_no_request_and_mixes_no_answer"
RUN_BY = {
    "make test": "it is what runs this",
    "make fuzz": "tests/cli/test_makefile.py::test_fuzz_asks_for_more_examples",
    "make lint": "it is run before every commit",
    "make models": "training takes hours; tests/model reads what it made",
    "make demo": "tests/test_readme.py::test_every_target_of_make_is_there",
    "make pictures": "tests/test_readme.py::test_the_pictures_are_what_forge_draws",
    "source .venv/bin/activate": "a shell's own",
    "forge serve --model tales --port 8080": "tests/test_readme.py::test_the_server_answers",
    "forge serve --live": f"{SERVED}::test_live_prints_every_step",
    "forge serve --model tales --access-log json": f"{OPERATING}::test_what_the_files_start_is_a_line_that_forge_takes",
    "forge watch http://127.0.0.1:8080": f"{SERVED}::test_watch_shows_the_steps_of_a_server_elsewhere",
    "forge serve --replicas 2 --router prefix": f"{CLUSTER}::test_a_prompt_goes_where_its_beginning_is_cached_and_why",
    "forge serve --prefill-replicas 1 --decode-replicas 1": f"{CLUSTER}::test_prefill_apart_and_sigterm",
    "forge serve --replicas 2 --max-replicas 8": f"{CLUSTER}::test_serve_adds_a_replica_when_requests_pile_up",
    "forge engines tales --replicas 4": f"{CLUSTER}::{ENGINES_CHANGE}",
    "forge engines tales --model tales-new.gguf": f"{CLUSTER}::{UPDATE}",
    "pip install 'ray[serve]'": "make test-cluster",
    "docker build -t forge .": "needs Docker, and its first step is the installation that all tests run in",
    "docker run --rm -p 127.0.0.1:8080:8080 -e FORGE_API_KEY=sk-3f9a41 --stop-timeout 15 forge": "needs Docker",
    "forge next": "tests/book/test_terminal.py::test_the_reader_is_brought_back_to_the_page_that_was_left",
    "forge replay run.jsonl --step": "tests/test_readme.py::test_a_recorded_run_is_walked_through",
    **dict.fromkeys(CHAPTERS, "tests/book/test_chapters.py::test_a_chapter_runs_to_its_end_and_its_checks_hold"),
}
"""A line that is not run here → the test that runs it, or why none does."""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text.splitlines()[0][:40].strip()}"

    @property
    def lines(self) -> list[str]:
        """The commands, one to an item, without what is said about them."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"\s+#\s.*$", "", line).strip() for line in joined) if line]

    @property
    def forge_lines(self) -> list[str]:
        """Those that are run here."""
        return [line for line in self.lines if line.startswith("forge ") and line not in RUN_BY]


NESTED = re.compile(r"^````.*?^````$", re.MULTILINE | re.DOTALL)
"""A block that shows a file of Markdown: the example of a chapter, which tests/experiments runs."""
TEXTS = {page: NESTED.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
BLOCKS = [Block(page, *found) for page, text in TEXTS.items() for found in FENCE.findall(text)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
FIRST_PAGE = [block for block in SHELL if block.page == PAGES[0]]
LINES = [line for block in SHELL for line in block.lines]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.text not in EXAMPLES.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, document) -> Path:  # noqa: F811
    """What a reader who follows the pages has beside forge: the repository's models, and files of their own."""
    path = tmp_path_factory.mktemp("reader")
    (path / "models").symlink_to(models_folder())
    (path / "FILE").write_text("The fox found a lantern.\nThe fox found a mill.\nThe sea is cold.\n")
    (path / "stories.txt").write_text("The fox lost his lantern.\nEverybody danced.\n")
    kernels = cache_folder()
    if kernels is not None:  # what this machine has compiled need not be compiled again
        (path / "cache" / "forge").mkdir(parents=True)
        (path / "cache" / "forge" / kernels.name).symlink_to(kernels)
    (path / "path" / "to").mkdir(parents=True)
    (path / "path" / "to" / "tokenizer.json").write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def hub():
    """A hub on this machine, which has the model that the README pulls: the bundled one under that name."""
    files = {"Qwen3-0.6B-Q8_0.gguf": (models_folder() / "tales-q8_0.gguf").read_bytes()}
    with running(FakeHub(repos={"Qwen/Qwen3-0.6B-GGUF": files})) as found:
        yield found


@pytest.fixture(scope="module")
def server():
    one = Server("--model", "tales")
    yield one
    one.stop()


@pytest.fixture
def reader(folder, hub, monkeypatch):
    """At a shell in that folder, with a home of their own, and no time to measure anything twice."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("forge.bench.tokenizer.TURN_SECONDS", 0.0)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Tell me a story.\n")))


def is_long(block: Block) -> bool:
    """Whether a command of the block measures something."""
    return any(line in SHORTER or " bench " in line or " compare " in line for line in block.forge_lines)


@pytest.mark.parametrize("line", sorted({line for block in SHELL for line in block.forge_lines}))
def test_every_command_is_one(line, capfd):
    assert main([*shlex.split(line)[1:], "--help"]) == 0
    assert "Usage" in capfd.readouterr().out


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.slow] * is_long(block))
        for block in SHELL
        if block.forge_lines and block not in FIRST_PAGE
    ],
    ids=str,
)
def test_every_command_works(block, reader, capfd, request):
    for line in block.forge_lines:
        typed = f"{line} {SHORTER.get(line, '')}"
        if "{url}" in typed:
            typed = typed.format(url=request.getfixturevalue("server").url)
        status = main(shlex.split(typed)[1:])
        out, err = capfd.readouterr()
        assert status == 0 or (status == DIFFERENT and "forge compare" in line), f"{line}: {err}"
        assert out and "\x1b" not in out, f"{line} said nothing"
        for pattern in CLAIMS.get(line, ()):
            assert re.search(pattern, out), f"{line}: the page says {pattern!r}\n{out[-3000:]}"


def test_every_command_of_the_reference_is_held_against_what_stands_beside_it():
    told = {line for block in SHELL for line in block.forge_lines}
    claimed = {*CLAIMS, *EXEMPT}
    assert told == claimed


def test_every_function_that_a_page_names_is_there():
    names = {name for text in TEXTS.values() for name in re.findall(r"`(forge\.[\w.]+)`", text)}
    assert len(names) >= 7
    for name in names:
        pkgutil.resolve_name(name)


def test_every_file_that_a_page_names_is_there():
    names = {
        name for text in TEXTS.values() for name in re.findall(r"`((?:forge|chapters|tests|models)/[\w./-]+)`", text)
    }
    assert names and [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_nothing_that_a_reader_is_told_to_type_is_left_out():
    kinds = ("forge ", "make ", "curl ")
    assert [line for line in LINES if line not in RUN_BY and not line.startswith(kinds)] == []
    assert [line for line in LINES if line not in RUN_BY and line.startswith("make ")] == []
    assert [line for line in (*SHORTER, *RUN_BY) if line not in LINES and line not in CHAPTERS] == []
    assert {block.language for block in BLOCKS if block.page.name != "operating.md"} == {"sh", "python", "yaml"}
    unfenced = [line for text in TEXTS.values() for line in FENCE.sub("", text).splitlines()]
    assert [line for line in unfenced if re.match(r"\s*(forge|make|pip|curl) ", line)] == []


def test_every_test_that_runs_a_command_is_there():
    for runner in RUN_BY.values():
        if "::" in runner:
            path, name = runner.split("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), runner


@pytest.mark.parametrize("target", sorted({line for line in LINES if line.startswith("make ")}))
def test_every_target_of_make_is_there(target, tmp_path, reader):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    planned = dry_run(tmp_path, target.split()[1])
    if target == "make demo":
        (line,) = re.findall(r"bin/(forge .*)$", planned, re.MULTILINE)
        assert main(shlex.split(line)[1:]) == 0


@pytest.mark.slow
def test_the_readme_needs_nothing_but_the_ordinary_installation(reader, hub, server, tmp_path):
    """Its commands in the order in which they stand, with every package hidden that `make demo` does not install."""
    lines = [
        f"{line} {SHORTER.get(line, '')}".format(url=server.url) for block in FIRST_PAGE for line in block.forge_lines
    ]
    script = "\n".join(["import shlex, sys", _HIDE, "from forge.cli.main import main", _RUN_LINES])
    hidden = json.dumps(sorted(_not_ordinary()))
    environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}
    (tmp_path / "models").symlink_to(models_folder())
    found = subprocess.run(
        [sys.executable, "-c", script, hidden, *lines],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    printed = found.stdout.split("\0")[1:]
    for line, out in zip([line for block in FIRST_PAGE for line in block.forge_lines], printed, strict=True):
        for pattern in CLAIMS[line]:
            assert re.search(pattern, out), f"{line}: the README says {pattern!r}\n{out[-3000:]}"
    for module in ("forge.server.app", "forge.server.http_protocol"):
        source = f"import sys\n{_HIDE}\nimport {module}"
        subprocess.run([sys.executable, "-c", source, hidden], env=environment, check=True)


_HIDE = """
import json
class Hidden:
    names = set(json.loads(sys.argv[1]))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
_RUN_LINES = """
for line in sys.argv[2:]:
    print(end="\\0", flush=True)
    status = main(shlex.split(line)[1:])
    if status not in (0, 3):
        sys.exit(f"{line}: {status}")
"""


def _not_ordinary() -> set[str]:
    """Top-level modules of the distributions that only the optional dependencies install."""
    ordinary, new = set(), {"forge-llm"}
    while new:
        ordinary |= new
        requirements = [Requirement(text) for name in new for text in _requires(name)]
        needed = {
            canonicalize_name(one.name) for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})
        }
        new = needed - ordinary
    modules = importlib.metadata.packages_distributions()
    return {
        module
        for module, owners in modules.items()
        if not any(canonicalize_name(owner) in ordinary for owner in owners) and module not in sys.stdlib_module_names
    }


def _requires(name: str) -> list[str]:
    if name == "forge-llm":
        return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # not on this platform
        return []


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_python_block_runs_and_has_the_attributes_that_it_names(block, reader, request):
    """`x.y  # also .z` says that x has a z too."""
    text, names = block.text, {"__name__": "__main__"}
    if "localhost:8080" in text:
        text = text.replace("http://localhost:8080", request.getfixturevalue("server").url)
    exec(compile(text, str(block), "exec"), names)
    for owner, others in re.findall(r"^(\S+)\.\w+  # also (.*)$", text, re.MULTILINE):
        assert [name for name in re.findall(r"\.(\w+)", others) if not hasattr(eval(owner, names), name)] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_shown_as_it_is_is_short_and_runs(path, capsys):
    assert f"`chapters/examples/{path.name}`" in EXTENDING and f"```python\n{EXAMPLES[path]}```" in EXTENDING
    lines = [line for line in EXAMPLES[path].splitlines() if line.strip()]
    assert len(lines) <= 35 and max(map(len, lines)) <= COLUMNS
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_the_server_answers(server):
    (line,) = (line for line in LINES if line.startswith("curl "))
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    words = [word.replace("localhost:8080", server.url) for word in shlex.split(line)]
    found = subprocess.run([*words, "--silent", "--show-error"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("data: ") and found.stdout.rstrip().endswith("data: [DONE]")


def test_a_recorded_run_is_walked_through(tmp_path):
    run = str(tmp_path / "run.jsonl")
    assert main(["trace-scheduler", "--requests", "4", "--no-lines", "--trace", run]) == 0
    with Terminal("replay", run, "--step") as terminal:
        terminal.wait_for("[q]uit")
        terminal.send("q")
        assert terminal.finish() == 0 and terminal.is_sane()


def test_the_readme_is_a_first_page():
    assert README.count("\n") <= 200


def test_the_rows_of_the_book_are_its_chapters():
    """A chapter of one's own needs no row: `forge chapters` lists all."""
    rows = re.findall(r"^\| (\d+) \| `forge ([a-z-]+)` \|", README, re.MULTILINE)
    chapters = [(str(entry.number), entry.command) for entry in entries()]
    assert len(rows) >= 12 and rows == chapters[: len(rows)]


def test_every_command_that_is_named_in_passing_is_one():
    chapters = set(re.findall(r"^\| \d+ \| `forge ([a-z-]+)` \|", README, re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`forge ([a-z][a-z-]+)", TEXTS[page]):
            assert name in chapters or command_named(name) is not None, f"{page.name}: forge {name}"


def test_every_file_that_a_page_points_to_is_there():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(r"`((?:forge|models|chapters|tests)/[\w./]*)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_figures_stand_in_the_results():
    results = (ROOT / "forge" / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    section = README.split("## How fast")[1].split("\n## ")[0]
    cells = [cell for row in section.splitlines() if row.startswith("| ") for cell in row.split("|")[2:-1]]
    numbers = {number for cell in cells if "`" not in cell for number in re.findall(r"\d[\d,.]*\d", cell)}
    assert len(numbers) > 30 and [number for number in sorted(numbers) if number not in results] == []


def test_every_command_of_the_figures_can_be_typed():
    """They take minutes: only their options are looked at."""
    section = README.split("## How fast")[1].split("\n## ")[0]
    lines = re.findall(r"\| `(forge [^`]+)` \|", section)
    assert len(lines) == section.count("| `forge")
    for line in lines:
        name, kind, *words = shlex.split(line)[1:]
        assert name == "bench"
        command = command_named(name).get_command(None, kind)
        command.make_context(kind, words)  # raises for an option that there is not


def test_commands_fit_the_page():
    assert [line for block in SHELL for line in block.text.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.slow
def test_the_pictures_are_what_forge_draws(tmp_path):
    """Each is drawn again, in a process of its own: the figures are another run's, the commands are the same."""
    drawing = [sys.executable, "-m", "chapters.draw_pictures", str(tmp_path)]
    subprocess.run(drawing, cwd=ROOT, check=True, capture_output=True)
    title = re.compile(r'-title" fill="[^"]*" text-anchor="middle"[^>]*>([^<]*)<')
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES.iterdir()}
    for path in PICTURES.iterdir():
        ours, theirs = ((folder / path.name).read_text(encoding="utf-8") for folder in (tmp_path, PICTURES))
        assert title.findall(ours) == title.findall(theirs) != []
        assert f"chapters/pictures/{path.name}" in README and "url(http" not in theirs
