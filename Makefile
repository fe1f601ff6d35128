# Two commands matter: `make serve` and `make test`. Both set themselves up, and start at once the second time.
#
#   PYTHON=python3.13   the interpreter for .venv (3.11 to 3.13)
#   ARGS="--port 9000"  more arguments for the command

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help serve test test-full chaos lint clean
.DEFAULT_GOAL := help

help:
	@echo "make serve   serve a small chat model (examples/smollm2.toml)"
	@echo "make test    check style and types, and run the tests"
	@echo "make lint    the first half of that"
	@echo "make test-full  the engine against transformers with nothing left out: an hour or two"
	@echo "make chaos   every fault at every moment over real servers, then 20 minutes of them: an hour or two"
	@echo "make clean   remove $(VENV)"

serve: $(VENV)/.serve
	@exec $(BIN)/runtime serve examples/smollm2.toml $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(ARGS)

# 200 requests on the real model for each page size, chunk size and CPU path, all of them judged by transformers, and 40
# prompts against its generate. `make test` takes a seeded share of these.
test-full: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --full tests/engine/test_equality.py $(ARGS)

# Each cell of the matrix actor x moment x fault, in the order that SEED gives, on both placements; then a soak of MINUTES
# on each. `make test` takes a few cells.
MINUTES ?= 20
SEED ?= 1
chaos: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/chaos --chaos-whole --chaos-seed $(SEED) \
		--soak-minutes $(MINUTES) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# A stamp file is newer than what it was made from: as long as that is so, nothing is installed.
$(VENV)/.serve: requirements.txt pyproject.toml $(wildcard runtime/engine/native/*.h runtime/engine/native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
		"Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: try make PYTHON=python3.13" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(PIP) install --requirement requirements.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m runtime.engine.native build || echo "serving works without the native CPU kernels, slower"
	@touch $@

$(VENV)/.test: $(VENV)/.serve requirements-test.txt
	@$(PIP) install --requirement requirements-test.txt
	@touch $@
