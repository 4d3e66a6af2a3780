# Every target works alone in a fresh checkout with Python 3.11 or later and make: each makes what it needs, once.
# A stamp in .venv stands for "installed as pyproject.toml says", so a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
OLDEST := .venv-oldest
FAST_TESTS := tests/gguf tests/tokenizer tests/cache tests/trace tests/model tests/backends/cpu/test_packing.py \
	tests/backends/cpu/test_features.py tests/engine/test_llm.py tests/cli/test_commands.py tests/cli/test_doctor.py
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-oldest test-all fuzz lint models pictures clean

help:
	@echo "make demo         install into $(VENV) and generate 32 tokens"
	@echo "make test         install what the tests need and run them all"
	@echo "make test-oldest  run the fast tests with the oldest versions that pyproject.toml allows"
	@echo "make test-all     all of the above tests"
	@echo "make fuzz         run the tests with many more random examples"
	@echo "make lint         check style with ruff, and types with mypy"
	@echo "make models       train the bundled models again"
	@echo "make pictures     draw the pictures of the README again"
	@echo "make clean        remove $(VENV) and caches"

demo: $(INSTALLED)
	$(BIN)/forge generate --kv basic "Once upon a time" 32

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

# uv chooses the declared minimum of each direct dependency, for a virtual environment beside the ordinary one.
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=. $(OLDEST)/bin/python -m pytest $(FAST_TESTS) $(PYTEST_ARGS)

# Exported, it asks those tests that have a size for all of it.
test-all: export FORGE_ALL_TESTS = 1
test-all: test test-oldest

fuzz: $(INSTALLED_DEV)
	FORGE_HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

models: $(INSTALLED_DEV)
	$(BIN)/python -m models.build

pictures: $(INSTALLED)
	$(BIN)/python -m chapters.draw_pictures

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

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .ruff_cache .mypy_cache .hypothesis
