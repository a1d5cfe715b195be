# On a fresh machine: Python 3.11 or newer, make and pip. Everything else comes from PyPI.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# For docs and dist, apart from the tests: beside PyYAML, which they bring, kombu knows one serialiser more.
TOOLS  := build/tools
PROOFS := tests/model tests/faults tests/endings
# With an exception at each moment of what we do, where make test tries some.
STRUCK := tests/integration/test_interrupted.py tests/integration/test_interrupted_greenlets.py
# These need the machine for themselves.
HEAVY  := tests/load tests/fire tests/combinations tests/celery_suite
APART  := $(PROOFS) $(HEAVY) tests/docker tests/topologies tests/page
# More at a time than there are cores, for tests wait most of the time. ARGS=-n0 for a debugger.
ABREAST := --numprocesses=4 --dist=worksteal
# Of bench and scenarios; RESULTS=benchmarks/results for what make compare writes.
RESULTS ?= benchmarks/out

.PHONY: help demo picture tickets test prove matrix topologies docker fire combinations celery-suite bench scenarios scale compare endings seen page docs dist lint format clean

help:
	@echo "make demo    see tasks that never overlap, on real workers (under a minute)"
	@echo "make picture the same, and keep its timeline as the README's picture"
	@echo "make tickets ten tickets, fifty buyers"
	@echo "make test    the tests, on real servers and real workers (about ten minutes on two cores)"
	@echo "make prove   every ending, a crowd, the model, the simulator, the mutants and the faults (long)"
	@echo "make matrix  the tests under Celery 5.4 to 5.7; one of them with CELERY=5.4"
	@echo "make topologies  deployments with Sentinel, and clusters, whose masters are killed, stopped and replaced (a few minutes)"
	@echo "make docker  workers, brokers and stores in containers, killed and restarted; and docker-compose.yml"
	@echo "make fire    workers under load while everything around them is broken (DURATION=180 SEED=7 PROGRAMS=60, or STORE=sentinel, STORE=cluster)"
	@echo "make combinations  all options with each other, drawn by a machine (SEED=7 PROGRAMS=100, or REPLAY='...')"
	@echo "                   under another Celery with CELERY=5.4"
	@echo "make celery-suite  Celery's own tests with the lock and without it (twenty minutes)"
	@echo "make bench   what a lock costs, beside the others (ten minutes)"
	@echo "make scenarios  what goes wrong, with each library (four minutes)"
	@echo "make scale   what one process and one worker can carry (ten minutes)"
	@echo "make compare write the comparison, README's lines of it and docs/scale.md anew"
	@echo "make endings write docs/endings.md anew"
	@echo "make seen    write docs/what-you-see.md anew (half a minute)"
	@echo "make page    the page of the locks in a real browser, and its pictures for the docs (needs chromium)"
	@echo "make docs    the site, in build/site; a dead link is an error (under a minute)"
	@echo "make dist    sdist and wheel, built twice to the same bytes, and checked"
	@echo "make lint    ruff and mypy"

demo: $(VENV)/.example
	$(BIN)/python -m example_project.demo

# Without an exit code of 0 the picture stays as it was.
picture: demo
	cp example_project/out/timeline.svg docs/timeline.svg

tickets: $(VENV)/.example
	$(BIN)/python -m example_project.tickets

test: $(VENV)/.develop
	$(BIN)/python -m pytest $(ABREAST) $(APART:%=--ignore=%) $(ARGS)

prove: $(VENV)/.develop
	$(BIN)/python -m pytest $(ABREAST) $(PROOFS) $(ARGS)
	STRIKE_EVERYWHERE=1 $(BIN)/python -m pytest $(ABREAST) --capture=fd -rP --show-capture=stdout $(STRUCK) $(ARGS)
	$(BIN)/python -m pytest $(HEAVY) $(ARGS)

matrix: $(VENV)/.matrix
	$(BIN)/nox $(if $(CELERY),--session "celery($(CELERY))") -- $(ARGS)

topologies: $(VENV)/.develop
	$(BIN)/python -m pytest $(ABREAST) tests/topologies $(ARGS)

docker: $(VENV)/.develop
	$(BIN)/python -m pytest tests/docker $(ARGS)

fire: $(VENV)/.develop
	$(BIN)/python -m tests.fire $(DURATION:%=--duration %) $(SEED:%=--seed %) $(PROGRAMS:%=--programs %) $(STORE:%=--store %) $(ARGS)

# As a variable of the environment, for a program is full of quotes.
combinations: export COMBINATIONS_REPLAY := $(REPLAY)
combinations: COMBINE := $(if $(CELERY),$(BIN)/nox --session "combinations($(CELERY))" --,$(BIN)/python -m tests.combinations)
combinations: $(if $(CELERY),$(VENV)/.matrix,$(VENV)/.develop)
	$(COMBINE) $(SEED:%=--seed %) $(PROGRAMS:%=--programs %) $(ARGS)

celery-suite: $(VENV)/.develop
	$(BIN)/python -m tests.celery_suite $(ARGS)

endings: $(VENV)/.develop
	WRITE_DOCS=1 $(BIN)/python -m pytest tests/endings/test_matrix.py $(ARGS)

seen: $(VENV)/.develop
	WRITE_DOCS=1 $(BIN)/python -m pytest tests/acceptance/test_what_you_see.py $(ARGS)

page: $(VENV)/.develop
	WRITE_DOCS=1 $(BIN)/python -m pytest tests/page $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.locks --out $(RESULTS)/locks.json $(ARGS)
	$(BIN)/python -m benchmarks.tasks --out $(RESULTS)/tasks.json $(ARGS)

scenarios: $(VENV)/.bench
	$(BIN)/python -m benchmarks.scenarios --out $(RESULTS)/scenarios.json $(ARGS)

scale: $(VENV)/.bench
	$(BIN)/python -m benchmarks.scale --out $(RESULTS)/scale.json $(ARGS)

compare: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(TOOLS)/.ready
	$(TOOLS)/bin/mkdocs build --strict $(ARGS)

dist: $(TOOLS)/.ready
	rm -rf dist build/again
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/python -m build --outdir build/again
	diff --recursive dist build/again
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .nox build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

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

$(VENV)/.bench: $(VENV)/.develop
	$(BIN)/pip install --quiet --group bench
	@touch $@

$(VENV)/.matrix: $(BIN)/pip pyproject.toml
	$(BIN)/pip install --quiet --group matrix
	@touch $@

$(TOOLS)/.ready: pyproject.toml
	$(PYTHON) -m venv --without-pip $(TOOLS)
	$(PYTHON) -m pip --quiet --disable-pip-version-check --python $(TOOLS) install "pip>=25.1"
	$(TOOLS)/bin/pip install --quiet --group docs --group release
	@touch $@
