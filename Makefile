# What every change is checked with. PYTHON=... picks another interpreter.
PYTHON ?= python
export PYTHONPATH := .:http

.PHONY: check lint types test test-full

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

# Everything; of the heaviest comparisons a seeded share.
test:
	$(PYTHON) -m pytest

# The whole engine against transformers, nothing left out: 200 requests on the real model for each page size, chunk size
# and CPU path, 40 prompts against generate. About an hour on two cores.
test-full:
	$(PYTHON) -m pytest --full tests/engine/test_equality.py
