# On a fresh machine: Python 3.11 or newer, make and pip. Everything else comes from PyPI.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help demo test lint format clean

help:
	@echo "make demo    see tasks that never overlap, on real workers (under a minute)"
	@echo "make test    all tests, on a real server and real workers"
	@echo "make lint    ruff and mypy"

demo: $(VENV)/.example
	$(BIN)/python -m example_project.demo

test: $(VENV)/.develop
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Without ensurepip, which Debian leaves out of python3; the machine's pip fills the environment.
$(BIN)/pip:
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --quiet --disable-pip-version-check --python $(VENV) install "pip>=25.1"

$(VENV)/.example: $(BIN)/pip pyproject.toml
	$(BIN)/pip install --quiet --editable . --group example
	@touch $@

$(VENV)/.develop: $(BIN)/pip pyproject.toml
	$(BIN)/pip install --quiet --editable . --group lint
	@touch $@
