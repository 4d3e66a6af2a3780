import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from forge.backends.cpu.kernel_table import all_items
from forge.cli import doctor
from forge.cli.doctor import Finding, is_healthy, screen
from forge.model import catalog
from forge.views.json_output import to_json
from forge.views.screen import draw
from tests.views.records import piped, terminal, written


@pytest.fixture
def no_torch(monkeypatch):
    """Importing torch takes seconds, and whether it is there is not what these tests are about."""
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "torch" else installed(package))


@pytest.fixture
def bundled(monkeypatch, tmp_path, model):
    """One bundled model, the small one, in a folder of its own."""
    path = tmp_path / "tales-q8_0.gguf"
    shutil.copy(model, path)
    entry = replace(catalog.BUNDLED_MODELS[0], file_name=path.name)
    monkeypatch.setattr(catalog, "models_folder", lambda: tmp_path)
    monkeypatch.setattr(catalog, "BUNDLED_MODELS", (entry,))
    return path


def findings(forge):
    found = forge("doctor", "--json")
    return found.status, {entry["name"]: entry for entry in json.loads(found.out)["findings"]}


def test_a_sound_machine_exits_0(forge, no_torch, bundled):
    status, found = findings(forge)
    assert status == 0
    assert found["Python"]["level"] == "ok" and found["tales-q8_0"]["level"] == "note"
    assert "torch" not in found and found["cuda"]["level"] == "note" and "pip install" in found["cuda"]["text"]
    assert {"CPU", "usable CPUs", "memory", "numpy", "numba", "device", "tokenizer"} <= set(found)


def test_a_missing_model_is_trouble(forge, no_torch, bundled):
    bundled.unlink()
    status, found = findings(forge)
    assert status == 1 and found["tales-q8_0"]["level"] == "trouble"
    assert "make models" in found["tales-q8_0"]["text"]


def test_a_published_digest_is_held_against_the_file(forge, no_torch, bundled):
    readme = bundled.parent / "README.md"
    readme.write_text(f"| `tales-q8_0.gguf` | 7 MB | `{catalog.sha256(bundled)}` |\n")
    assert findings(forge)[1]["tales-q8_0"]["level"] == "ok"
    readme.write_text(f"| `tales-q8_0.gguf` | 7 MB | `{'0' * 64}` |\n")
    status, found = findings(forge)
    assert status == 1 and found["tales-q8_0"]["level"] == "trouble"


def declare(monkeypatch, versions):
    """What pyproject.toml declares, and of each library this version, or else its lower bound."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest: dict[str, str | None] = dict(re.findall(r"^([\w-]+)[^>]*>=?([\d.]+)", line)[0] for line in declared)
    monkeypatch.setattr("importlib.metadata.requires", lambda package: declared)
    installed = lowest | {"tokenizers": "0.22.1", "torch": None} | versions
    monkeypatch.setattr(doctor, "_version", lambda package: installed.get(package))


def test_a_missing_library_is_trouble(forge, bundled, monkeypatch):
    declare(monkeypatch, {"numba": None})
    status, found = findings(forge)
    assert status == 1 and found["numba"]["level"] == "trouble"
    assert found["numba"]["text"].startswith("missing: pip install 'numba<")
    assert found["gguf"]["level"] == "ok"


def test_a_version_outside_the_declared_ones_is_trouble(forge, bundled, monkeypatch):
    versions = {"numba": "0.61.2", "llvmlite": "9.0", "tokenizers": "0.22.0", "typer": "0.15.3", "gguf": "0.16.3"}
    declare(monkeypatch, versions)
    status, found = findings(forge)
    cure = "is outside the versions that were tried: pip install"
    assert status == 1 and found["numba"]["text"] == f"0.61.2 {cure} 'numba<0.69,>=0.62'"
    assert found["llvmlite"]["text"].startswith(f"9.0 {cure}")
    assert {name for name, entry in found.items() if entry["level"] == "trouble"} == set(versions)


def test_what_was_chosen_is_named_with_what_it_gains(forge, no_torch, bundled, monkeypatch):
    monkeypatch.setattr("forge.backends.cpu.processor.usable_cpus", lambda: 3)
    monkeypatch.setattr(doctor.machine, "huge_pages", lambda: "never")
    status, found = findings(forge)
    assert status == 0
    assert found["threads"]["text"].startswith("3, one for each usable CPU (--threads)")
    assert found["keys and values"]["text"].startswith("int8 (--kv-dtype)")
    assert found["huge pages"]["level"] == "note" and "echo madvise" in found["huge pages"]["text"]
    compiled, every = map(int, re.search(r"(\d+) of (\d+) are compiled", found["kernels"]["text"]).groups())
    assert every == len(all_items()) and compiled == sum(item.is_cached for item in all_items())
    assert {"draw", "attention", "start"} <= {item.name for item in all_items()}


def test_kernels_that_came_with_the_package_are_counted_where_they_lie(forge, no_torch, bundled, monkeypatch, tmp_path):
    monkeypatch.setattr("forge.backends.cpu.compilation.shipped_folder", lambda: tmp_path)
    monkeypatch.setattr("forge.backends.cpu.compilation.cache_folder", lambda: None)
    status, found = findings(forge)
    assert status == 0 and found["kernels"]["level"] == "ok"
    compiled = sum(item.is_cached for item in all_items())
    text = f"{compiled} of {len(all_items())} are compiled, with the package, in {tmp_path}"
    assert found["kernels"]["text"].endswith(text)


@pytest.mark.parametrize(
    ("text", "mode"), [("always [madvise] never", "madvise"), ("always madvise [never]", "never"), (None, None)]
)
def test_the_system_says_whether_there_are_huge_pages(tmp_path, text, mode):
    if text is not None:
        path = tmp_path / "sys/kernel/mm/transparent_hugepage"
        path.mkdir(parents=True)
        (path / "enabled").write_text(text + "\n")
    assert doctor.machine.huge_pages(tmp_path) == mode


def test_the_tokenizer_in_use_is_named(forge, no_torch, bundled):
    assert findings(forge)[1]["tokenizer"]["text"]


def test_a_person_gets_a_table(forge, no_torch, bundled):
    out = forge("doctor").out
    assert out.startswith("Can this machine run forge") and "Nothing needs mending" in out


FINE = [Finding("Python", "ok", "3.11"), Finding("cuda", "note", "no GPU")]
BAD = [*FINE, Finding("numba", "trouble", "missing: pip install numba")]


def shown(findings):
    console = piped()
    draw(console, screen(findings))
    return written(console)


def test_a_note_is_no_trouble():
    assert is_healthy(FINE) and not is_healthy(BAD)
    assert "Nothing needs mending" in shown(FINE)


def test_trouble_is_marked_and_counted():
    out = shown(BAD)
    assert "✗" in out and "1 of 3" in out and "pip install numba" in out


def test_a_narrow_terminal_loses_neither_the_mark_nor_the_text():
    console = terminal(20)
    draw(console, screen(BAD))
    out = written(console)
    assert "✗" in out and "missing" in out and "no GPU" in out


def test_the_json_object_has_every_finding():
    assert json.loads(to_json(BAD))[2] == {
        "name": "numba",
        "level": "trouble",
        "text": "missing: pip install numba",
    }
