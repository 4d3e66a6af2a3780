"""The kernels on an emulated ARM server: its logits have the bits of this machine's. `make test-arm` prepares it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.backends.cpu.models import ROOT, run_python

QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
ARM = Path(os.environ.get("FORGE_ARM_ROOT", ROOT / ".arm64")).resolve()
"""A Debian for ARM with Python, and in `site` the packages that forge needs."""
MODELS = ["Q8_0", "Q6_K"]

pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="emulating ARM needs qemu-aarch64: apt install qemu-user-static"),
    pytest.mark.skipif(not (ARM / "site").is_dir(), reason="there is no ARM Python: make test-arm"),
]


@pytest.mark.parametrize("path", ["neon-dot", "portable"])
def test_an_emulated_neoverse_computes_the_same_bits(path, tmp_path):
    command = [QEMU, "-cpu", "neoverse-n1", "-L", str(ARM), str(ARM / "usr/bin/python3")]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ARM / 'site'}:{ROOT}",
        "XDG_CACHE_HOME": str(tmp_path),
        "FORGE_CPU_KERNEL": path,
    }
    command += ["-m", "tests.backends.cpu.digests", *MODELS]
    there = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert there.returncode == 0, there.stderr
    name, _folder, *digests = there.stdout.splitlines()
    here = run_python(["-m", "tests.backends.cpu.digests", *MODELS]).stdout.splitlines()
    assert name == path and digests == here[2:]
