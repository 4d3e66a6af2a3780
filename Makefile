# Every target works alone in a fresh checkout with Python 3.11 or later and make: each makes what it needs, once.
# A stamp in .venv stands for "installed as pyproject.toml says", so a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
OLDEST := .venv-oldest
ARM := .arm64
FAST_TESTS := tests/gguf tests/tokenizer tests/cache tests/trace tests/model tests/backends/cpu/test_packing.py \
	tests/backends/cpu/test_processor.py tests/engine/test_llm.py tests/cli/test_commands.py tests/cli/test_doctor.py
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-gpu test-oldest test-cluster test-arm test-all fuzz mutants lint models pictures wheel clean

help:
	@echo "make demo         install into $(VENV) and generate 32 tokens"
	@echo "make test         install what the tests need and run all but the slow ones"
	@echo "make test-oldest  run the fast tests with the oldest versions that pyproject.toml allows"
	@echo "make test-cluster install Ray Serve too and run the tests of many engines"
	@echo "make test-gpu     run the tests of --device cuda with compiled kernels, where torch sees a GPU"
	@echo "make test-all     all of the above tests, the slow ones too"
	@echo "make test-arm     compare the kernels' bits with those of an emulated ARM server (as root, on Debian)"
	@echo "make fuzz         run the tests with many more random examples"
	@echo "make mutants      change the code in one place at a time: do the tests notice? (MUTANTS='--sample 100')"
	@echo "make lint         check style with ruff, and types with mypy"
	@echo "make models       train the bundled models again"
	@echo "make pictures     draw the pictures of the README again"
	@echo "make wheel        build dist/*.whl, with the kernels compiled for common processors"
	@echo "make clean        remove $(VENV) and caches"

demo: $(INSTALLED)
	$(BIN)/forge generate --kv basic "Once upon a time" 32

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

# uv chooses the declared minimum of each direct dependency, for a virtual environment beside the ordinary one.
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=. $(OLDEST)/bin/python -m pytest -n auto --dist loadfile $(FAST_TESTS) $(PYTEST_ARGS)

# Exported, it lets tests run that are marked slow.
test-all: export FORGE_ALL_TESTS = 1
test-all: test test-oldest test-cluster

# Ray is large, and its tests start processes: they run here, one after another, and are left out where Ray is missing.
test-cluster: $(INSTALLED_DEV)
	$(PIP) install --quiet --editable ".[cluster]"
	$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

test-gpu: export FORGE_ALL_TESTS = 1
test-gpu: $(INSTALLED_DEV)
	@if $(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then \
	  $(BIN)/python -m pytest -m gpu tests/backends/cuda $(PYTEST_ARGS); \
	else echo "make test-gpu: skipped, torch sees no GPU here (make test runs the same tests interpreted)"; fi

test-arm: $(INSTALLED_DEV) $(ARM)/.installed
	FORGE_ARM_ROOT=$(ARM) $(BIN)/python -m pytest tests/backends/cpu/test_arm.py $(PYTEST_ARGS)

fuzz: $(INSTALLED_DEV)
	FORGE_HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest $(PYTEST_ARGS)

mutants: $(INSTALLED_DEV)
	$(BIN)/python -m tests.mutants $(MUTANTS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

models: $(INSTALLED_DEV)
	$(BIN)/python -m models.build

pictures: $(INSTALLED)
	$(BIN)/python -m chapters.draw_pictures

wheel: $(INSTALLED)
	rm -rf build/kernels
	$(BIN)/python -m forge.backends.cpu.ahead build/kernels
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

# A virtual environment that already works is kept. The stamp waits for pip to answer: on a Python without ensurepip,
# venv fails half-way and leaves the folder behind.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "forge needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) --version >/dev/null && touch $@

$(INSTALLED): pyproject.toml | $(VENV)/.created
	$(PIP) install --quiet --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(VENV)/.created
	$(PIP) install --quiet --editable ".[dev]"
	@touch $(INSTALLED) $@

$(OLDEST)/.installed: pyproject.toml
	@$(OLDEST)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[test]"
	@touch $@

# A Debian for ARM whose packages are unpacked and not installed, which is enough for qemu to run its Python.
$(ARM)/.installed: pyproject.toml | $(VENV)/.created
	@for tool in debootstrap dpkg-deb qemu-aarch64-static; do command -v $$tool >/dev/null || \
	  { echo "make test-arm needs $$tool: apt install debootstrap qemu-user-static"; exit 1; }; done
	test -e $(ARM)/usr/bin/python3 || debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm $(ARM)
	for package in $(ARM)/var/cache/apt/archives/*.deb; do dpkg-deb -x $$package $(ARM); done
	$(PIP) install --quiet --target $(ARM)/site --upgrade --python-version 3.11 --only-binary=:all: \
	  --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 numpy numba
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(ARM) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
