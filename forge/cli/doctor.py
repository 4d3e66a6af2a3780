"""`forge doctor`: can this machine run forge, and with what? Looks, reports, changes nothing."""

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from forge.cli import machine, options
from forge.cli.arguments import command
from forge.errors import ForgeError
from forge.views.formatting import size
from forge.views.palette import GOOD, QUIET, TROUBLE
from forge.views.screen import Part, Report, Table, question, report
from forge.views.text import one_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from forge.model.backend import Backend

NEEDS_MENDING = 1
"""The exit status when something needs mending."""
OLDEST_PYTHON = (3, 11)
PACKAGE = "forge-llm"
Level = Literal["ok", "note", "trouble"]
_SIGNS = {"ok": ("✓", GOOD), "note": ("·", QUIET), "trouble": ("✗", TROUBLE)}
_NARROW = 32
"""Columns of a terminal that leaves no room for a table."""
OPTIONAL = {"fastokens": "tokenizing is slower without it"}


@dataclass(frozen=True)
class Finding:
    """One check of this machine and its result."""

    name: str
    level: Level
    text: str


@command
def doctor() -> Report:
    """Look over this machine: Python, CPU, memory, libraries, GPU, models. Exit status 1 if something needs mending."""
    findings = [*_system(), *_libraries(), *_devices(), *_models(), *_tokenizer()]
    facts = {"healthy": is_healthy(findings), "findings": findings}
    return report(facts, lambda: screen(findings), 0 if is_healthy(findings) else NEEDS_MENDING)


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "trouble" for finding in findings)


def screen(findings: Sequence[Finding]) -> Iterator[Part]:
    """Draw a line for each finding, and what is to be done next."""
    yield from question("Can this machine run forge, and with what?")
    cells = [_cells(finding) for finding in findings]
    table = Table(("", "", ""), cells, names=3, wraps=(2,))
    yield lambda width: map(Text(" ").join, cells) if width < _NARROW else [table]
    broken = sum(finding.level == "trouble" for finding in findings)
    verdict = 'Nothing needs mending. Try: forge generate --kv basic "Once upon a time" 32'
    yield from (None, Text(f"{broken} of {len(findings)} need mending, marked ✗." if broken else verdict))


def _cells(finding: Finding) -> list[Text]:
    sign, style = _SIGNS[finding.level]
    text = Text(one_line(finding.text), TROUBLE if finding.level == "trouble" else "")
    return [Text(sign, style), Text(one_line(finding.name), QUIET), text]


def _system() -> Iterator[Finding]:
    from forge.backends.cpu.processor import cgroup_quota, usable_cpus

    python = f"{platform.python_version()} ({platform.python_implementation()})"
    is_recent = sys.version_info >= OLDEST_PYTHON
    yield Finding("Python", "ok", python) if is_recent else Finding("Python", "trouble", f"{python}; 3.11 is needed")
    yield Finding("platform", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    features = machine.cpu_features()
    known = " ".join(features) if features else "instruction sets unknown"
    yield Finding("CPU", "ok" if features else "note", f"{machine.cpu_model()}: {known}")
    quota = cgroup_quota()
    yield Finding("usable CPUs", "ok", f"{usable_cpus()}" + (f" (a container's quota is {quota:g})" if quota else ""))
    total, available = machine.memory_bytes()
    if total is None:
        yield Finding("memory", "note", "this system does not say")
    else:
        yield Finding("memory", "ok", f"{size(total)}" + (f", {size(available)} available" if available else ""))


def _libraries() -> Iterator[Finding]:
    for requirement in _requirements():
        name, version = requirement.name, _version(requirement.name)
        level: Level
        if version is None:
            level, text = ("note", f"not installed: {OPTIONAL[name]}") if name in OPTIONAL else ("trouble", "missing")
        elif requirement.specifier.contains(version, prereleases=True):
            level, text = "ok", version
        else:
            level, text = "trouble", f"{version} is outside the versions that were tried"
        cure = f": pip install '{name}{requirement.specifier}'" if level == "trouble" else ""
        yield Finding(name, level, text + cure)


def _devices() -> Iterator[Finding]:
    from forge.backends.choices import DEFAULT_DEVICE
    from forge.backends.devices import create_backend

    try:
        backend = create_backend(DEFAULT_DEVICE)
        yield Finding("device", "ok", f"{DEFAULT_DEVICE} ({backend.description}), what runs without --device")
        yield from _choices(backend)
    except ForgeError as error:
        yield Finding("device", "trouble", str(error))
    yield _kernels()
    torch_version = _version("torch")
    if torch_version is None:
        yield Finding("cuda", "note", "PyTorch is not installed; with an NVIDIA GPU: pip install 'forge-llm[cuda]'")
    else:
        yield _cuda(torch_version)


def _choices(backend: "Backend") -> Iterator[Finding]:
    """Yield what the CPU backend chose by itself, and what a choice gained where forge/bench/RESULTS.md measured it."""
    from forge.backends.cpu.processor import usable_cpus

    yield Finding(
        "threads",
        "ok",
        f"{usable_cpus()}, one for each usable CPU (--threads); where they would wait for each other longer than they "
        "compute, a pass runs on one: a token of tales in 0.17 ms and not 0.28 (Zen 4)",
    )
    yield Finding(
        "keys and values",
        "ok",
        f"{backend.default_kv_dtype} (--kv-dtype), about half the memory of bfloat16, which is half of "
        "float32's; behind 8,192 tokens a 0.6B model decodes a token in 32.0 ms, with bfloat16 in 43.2 (Zen 5)",
    )
    gain = "a 0.6B model decodes a token in 12.9 ms with them, 16.8 without (Zen 4)"
    match machine.huge_pages():
        case "always" | "madvise" as mode:
            yield Finding("huge pages", "ok", f"{mode}: weights and caches lie in them; {gain}")
        case None:
            yield Finding("huge pages", "note", f"this system does not say; {gain}")
        case mode:
            cure = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
            yield Finding("huge pages", "note", f"{mode}: {gain}; to have them: {cure}")


def _kernels() -> Finding:
    from forge.backends.cpu.compilation import cache_folder, cache_problem, shipped_folder
    from forge.backends.cpu.kernel_table import all_items
    from forge.backends.cpu.processor import FORCE_VARIABLE, runnable

    try:
        shipped, folder = shipped_folder(), cache_folder()
    except ForgeError as error:
        return Finding("kernels", "trouble", str(error))
    choice = f"instruction sets {', '.join(runnable())} ({FORCE_VARIABLE} forces one)"
    if shipped is None and (problem := cache_problem()) is not None:
        return Finding("kernels", "trouble", f"{choice}; {problem}")
    items = all_items()
    compiled = sum(item.is_cached for item in items)
    origin = f"as models needed them, in {folder}" if shipped is None else f"with the package, in {shipped}"
    return Finding("kernels", "ok", f"{choice}; {compiled} of {len(items)} are compiled, {origin}")


def _cuda(torch_version: str) -> Finding:
    try:
        import torch

        if not torch.cuda.is_available():
            return Finding("cuda", "note", f"PyTorch {torch_version} sees no NVIDIA GPU")
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("cuda", "ok", f"PyTorch {torch_version}, CUDA {torch.version.cuda}: {names}")
    except Exception as error:  # a broken PyTorch raises whatever its loader meets
        return Finding("cuda", "note", f"PyTorch {torch_version} does not load: {error}")


def _models() -> Iterator[Finding]:
    from forge.model.catalog import BUNDLED_MODELS, sha256

    for model in BUNDLED_MODELS:
        if not model.present:
            missing = f"{options.shown_path(model.path)} is missing; make models trains it again"
            yield Finding(model.name, "trouble", missing)
            continue
        digest, expected = sha256(model.path), _published_digests(model.path.parent).get(model.path.name)
        known = f"{size(model.bytes)}, SHA-256 {digest[:12]}…"
        if expected is None:
            yield Finding(model.name, "note", f"{known}, and none published to hold it against")
        elif digest != expected:
            yield Finding(model.name, "trouble", f"{known}, but {expected[:12]}… was published: get the file again")
        else:
            yield Finding(model.name, "ok", f"{known} as published")


def _published_digests(folder: Path) -> dict[str, str]:
    """Map each file name to its SHA-256, from the lines of the models' README or checksum file that hold both."""
    import re

    digests: dict[str, str] = {}
    for name in ("SHA256SUMS", "README.md"):
        path = folder / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            digest, file = re.search(r"\b[0-9a-f]{64}\b", line), re.search(r"[\w.-]+\.gguf\b", line)
            if digest and file:
                digests.setdefault(file[0], digest[0])
    return digests


def _tokenizer() -> Iterator[Finding]:
    """Return which tokenizer the default model gets, and why not the fast one if it does not."""
    from forge.gguf import GGUFFile
    from forge.model.catalog import DEFAULT_MODEL, resolve_model
    from forge.tokenizer import Tokenizer, spec_from_gguf

    try:
        with GGUFFile.open(resolve_model(DEFAULT_MODEL)) as file:
            tokenizer = Tokenizer(spec_from_gguf(file))
        used = tokenizer.prepare()
    except ForgeError as error:
        yield Finding("tokenizer", "trouble", str(error))
        return
    reason = tokenizer.fallback_reason
    yield Finding("tokenizer", "note" if reason else "ok", f"{used}: {reason}" if reason else used)


def _requirements() -> "list[Requirement]":
    """Return the requirements of pyproject.toml for this machine, and those of its extra cuda that are installed."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    def applies(requirement: Requirement) -> bool:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            return True
        return marker.evaluate({"extra": "cuda"}) and _version(requirement.name) is not None

    return [requirement for requirement in map(Requirement, requires(PACKAGE) or ()) if applies(requirement)]


def _version(package: str) -> str | None:
    """Return the installed version, without importing the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
