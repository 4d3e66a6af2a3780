"""What `import forge` and `forge --help` may load: no library that is heavy, no engine, no model."""

import json
import platform
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT, environment

HEAVY = ("torch", "numba", "numpy", "gguf", "tokenizers", "fastokens", "jinja2", "transformers", "llvmlite")
LOADED = "import json, sys; json.dump(sorted(sys.modules), sys.stderr)"


def modules_after(code: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LOADED}"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        cwd=ROOT,
    )
    return set(json.loads(found.stderr))


@pytest.mark.parametrize(
    "code",
    [
        "import forge",
        "import forge.cli.main",
        "from forge.cli.main import main; main(['--help'])",
        "from forge.cli.main import main; main(['generate', '--help'])",
        "from forge.cli.main import main; main(['compare', '--help'])",
        "from forge.cli.main import main; main(['--version'])",
    ],
)
def test_nothing_heavy_is_loaded(code):
    loaded = modules_after(code)
    assert not [name for name in HEAVY if name in loaded]
    assert "forge.llm" not in loaded and "forge.backends" not in loaded


def test_importing_the_command_line_loads_no_view():
    assert not [name for name in modules_after("import forge.cli.main") if name.startswith("forge.views")]


def test_generating_on_the_cpu_does_not_load_torch(model):
    arguments = ["generate", "Once", "1", "-m", model]
    loaded = modules_after(f"from forge.cli.main import main; assert main({arguments!r}) == 0")
    assert "torch" not in loaded


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="LLVM loads the kernels here")
def test_generating_with_compiled_kernels_does_not_load_llvm(model):
    """Its library takes longer to load than all kernels."""
    code = f"from forge.cli.main import main; assert main({['generate', 'Once', '1', '-m', model]!r}) == 0"
    modules_after(code)  # compiles what is not compiled
    assert not {"numba", "llvmlite.binding"} & modules_after(code)
