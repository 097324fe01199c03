# Every target sets up what it needs in .venv, bench, test-floor and test-newest in environments of their own, from
# nothing: Python 3.11 or newer, a C compiler and make are enough.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first Python that is new enough; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for candidate in python3 python3.11 python3.12 python3.13 python; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; done)

VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
FLOOR := .venv-floor
NEWEST := .venv-newest
# pip would compile the 20,000 files of all packages; Python compiles the few that it imports, and keeps the result.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
SETUP := pyproject.toml constraints.txt

# Build isolation reads the pins from here; the name it reads depends on pip's version.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Tests run in one process for each core, file by file (tests/conftest.py); those that train on ranks start these besides.
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST := -m pytest -n $(WORKERS) --dist loadfile

# The oldest torch that pyproject.toml allows. It, and the newest, want another setuptools than the one that is pinned.
FLOOR_TORCH = $(shell sed -n 's/^ *"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
install_into = PIP_CONSTRAINT=$(1)/constraints.txt PIP_BUILD_CONSTRAINT=$(1)/constraints.txt \
	$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-compile

# All of one process, and of several what others rest on.
QUICK := tests/unit tests/distributed/test_ddp.py tests/distributed/test_clipping.py tests/distributed/test_checkpoint_files.py

DEMO ?= --strategy ddp --devices 2 --accelerator cpu

# The first Python that has torch; `make cuda PYTHON=...` names another. A rehearsal takes the tests' own.
CUDA_PYTHON = $(if $(REHEARSE),$(BIN)/python,$(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or \
	$(shell for candidate in python3 python3.11 python3.12 python3.13 python $(BIN)/python; do \
	$$candidate -c 'import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or not u.find_spec("torch"))' \
	2>/dev/null && echo $$candidate && break; done),$(PYTHON))))

.PHONY: help demo test test-rest test-all durations test-floor test-newest coverage quick faults fuzz lint format types bench cuda cuda-wheels docs reference parity clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.stamp-demo ## Train a byte-level GPT on two processes, in about two minutes
	@$(BIN)/python examples/gpt_stdlib.py $(DEMO)

test: $(VENV)/.stamp-dev ## Run the small size of the test suite (ARGS="-k name" narrows it, WORKERS=0 keeps it in one process)
	@$(BIN)/python $(PYTEST) --size small $(ARGS)

test-rest: $(VENV)/.stamp-dev ## Run the tests that the small size leaves out
	@$(BIN)/python $(PYTEST) --size rest $(ARGS)

test-all: $(VENV)/.stamp-dev ## Run the whole test suite
	@$(BIN)/python $(PYTEST) $(ARGS)

durations: $(VENV)/.stamp-dev ## Run the whole test suite, and list the slow tests anew (tests/sizes.py)
	@$(BIN)/python $(PYTEST) --write-slow-tests $(ARGS)

test-floor: $(FLOOR)/.stamp ## The same on the oldest torch that is allowed, a download of 3 GB
	@$(FLOOR)/bin/python $(PYTEST) $(ARGS)

test-newest: $(NEWEST)/.stamp ## The same on the newest torch that there is, a download of 3 GB
	@$(call install_into,$(NEWEST)) --upgrade torch || echo "The newest torch could not be asked for: going on with the one that is there."
	@$(NEWEST)/bin/python $(PYTEST) $(ARGS)

coverage: $(VENV)/.stamp-dev ## Run the suite and print which part of the code it executes, in all processes, about half as long again
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run $(PYTEST) $(ARGS); status=$$?; \
		$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report && exit $$status

quick: $(VENV)/.stamp-dev ## Run what a change is likely to break, in about a minute (lint and types apart)
	@$(BIN)/python $(PYTEST) -q --size fast $(QUICK) $(ARGS)

faults: $(VENV)/.stamp-dev ## Kill saves and runs at random instants, and let seeded faults strike, 200 times each (FAULTS=20 make faults)
	@FAULTS=$(or $(FAULTS),200) $(BIN)/python -m pytest -s --timeout 0 tests/faults $(ARGS)

fuzz: $(VENV)/.stamp-dev ## Draw programs and compare them with a plain loop (COUNT=2000 SEED=7 ARGS="--strategies zero")
	@$(BIN)/python -m tests.fuzz --count $(or $(COUNT),200) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(VENV)/.stamp-dev ## Check format and lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

format: $(VENV)/.stamp-dev ## Put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.stamp-dev ## Type-check both packages strictly, and tests, examples and benchmarks
	@$(BIN)/mypy

bench: $(BENCH)/.stamp ## Time steps and checkpoints against PyTorch by hand, the disk, and others
	@$(BENCH)/bin/python -m benchmarks $(ARGS)

cuda: $(if $(REHEARSE),$(VENV)/.stamp-dev) ## Run all that needs a GPU, in parts, with the torch that is there (PART=steps FRESH=1 REHEARSE=1)
	@$(CUDA_PYTHON) -m benchmarks.cuda $(PART) $(if $(REHEARSE),--rehearse) \
		$(if $(FRESH),--fresh=$(if $(filter failed,$(FRESH)),failed,all)) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

cuda-wheels: $(VENV)/.stamp-dev ## Pack what a machine with torch, but without a network, lacks for it (ARGS="--pythons 3.13")
	@$(BIN)/python -m benchmarks.cuda.wheels $(ARGS)

parity: $(VENV)/.stamp-dev ## Print the matrix of strategies and parity cases
	@$(BIN)/python -m tests.parity $(ARGS)

reference: $(VENV)/.stamp-dev ## Generate docs/at-a-glance.md from the docstrings
	@$(BIN)/python docs/plain_reference.py

docs: $(VENV)/.stamp-docs ## Build the documentation into site/, warnings being errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

clean: ## Remove what builds, tests and runs left behind
	rm -rf .coverage .coverage.* site dist runs cuda-rehearsal drivetrain_logs checkpoints .hypothesis .mypy_cache .ruff_cache .pytest_cache
	find framework strategies tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the virtual environments
	rm -rf $(VENV) $(BENCH) $(FLOOR) $(NEWEST) .cuda cuda-wheels cuda-wheels.tar

%/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or say 'make PYTHON=/path/to/python'." >&2; exit 1; }
	$(PYTHON) -m venv $*

$(VENV)/.stamp-demo: $(SETUP) | $(BIN)/python
	@echo "Setting up $(VENV) with the extra 'rich' (once, and after a change of pins) ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.[rich]'
	@touch $@

$(VENV)/.stamp-dev: $(SETUP) | $(BIN)/python
	@echo "Setting up $(VENV) with the extra 'dev' (once, and after a change of pins) ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.stamp-docs: $(SETUP) | $(BIN)/python
	@echo "Setting up $(VENV) with the extra 'docs' (once, and after a change of pins) ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(BENCH)/.stamp: $(SETUP) | $(BENCH)/bin/python
	@echo "Setting up $(BENCH) with the extra 'bench' (once, and after a change of pins) ..."
	@$(BENCH)/bin/python $(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(FLOOR)/.stamp $(NEWEST)/.stamp: %/.stamp: $(SETUP) | %/bin/python
	@echo "Setting up $* with the extra 'dev' and a torch of its own (once, and after a change of pins) ..."
	@grep -vE '^(torch|setuptools)==' constraints.txt > $*/constraints.txt
	@$(call install_into,$*) -e '.[dev]' torch$(if $(filter $(FLOOR),$*),==$(FLOOR_TORCH))
	@touch $@
