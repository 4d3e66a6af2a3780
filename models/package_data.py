"""Puts the bundled models and the chapters into a wheel, as `forge/_data/`, and kernels where they are compiled.

A build hook of hatchling (see pyproject.toml). Only a real wheel gets them: an editable installation finds both where
they lie, and must be possible before the models exist, since training them needs it. `make wheel` compiles the kernels
first; a wheel that is built without them compiles each at its first use.
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackageData(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        files = [*root.glob("models/*.gguf"), root / "models" / "README.md", *root.glob("chapters/*.md")]
        for path in sorted(files):
            build_data["force_include"][str(path)] = f"forge/_data/{path.relative_to(root)}"
        compiled = root / "build" / "kernels"
        if compiled.is_dir():
            build_data["force_include"][str(compiled)] = "forge/backends/cpu/shipped"
