# On a fresh machine: Python 3.11 or newer, make and pip. Everything else comes from PyPI.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# For docs and dist. Not the tests' environment: these tools bring PyYAML, which gives kombu another serialiser.
TOOLS  := build/tools
# Each of these folders is a part of `make prove`, and a target of its own.
PARTS  := faults endings topologies docker load
# These need the machine for themselves.
ALONE  := docker load
# More tests at a time than cores, because tests mostly wait. With a debugger use ARGS=-n0.
ABREAST := --numprocesses=4 --dist=worksteal
# One test takes minutes there.
PATIENT := --timeout=1500
# Where bench, scenarios and scale write. `make compare` reads benchmarks/results.
RESULTS ?= benchmarks/out
# For nightly.
SEEDS  ?= 1 2 3

.PHONY: help demo picture tickets test prove depth seeds $(PARTS) nightly matrix clients fire combinations celery-suite bench scenarios scale compare seen page docs dist lint format clean

help:
	@echo "make demo    see tasks that never overlap, on real workers (under a minute)"
	@echo "make picture the same, and keep its timeline as the README's picture"
	@echo "make tickets ten tickets, fifty buyers"
	@echo "make test    each promise once, on real workers and an embedded Valkey; nothing else has to be installed (four minutes on two cores)"
	@echo "make prove   the depth, of which each part is a target of its own:"
	@echo "             depth       the folders of make test: what takes longer, and on Redis and RabbitMQ, with TLS, with clocks that are set"
	@echo "             faults      a held lock while its server or the network misbehaves"
	@echo "             endings     every ending on every pool (WRITE_DOCS=1 writes docs/reference/endings.md)"
	@echo "             topologies  Sentinel, replicas and clusters, whose masters are killed, stopped and replaced"
	@echo "             seeds       fire, combinations and a part of Celery's own tests, from fixed seeds"
	@echo "             load        a crowd on one key, and what one worker can carry"
	@echo "             docker      docker-compose.yml: a beat, two workers and their Redis in containers (needs a Docker engine)"
	@echo "             matrix      the tests under Celery 5.4 to 5.7; one of them with CELERY=5.4"
	@echo "             clients     each topology under redis-py 5.0 to the newest; one of them with REDIS=6.4"
	@echo "make nightly all that takes hours: more seeds, and the tests that are not steady yet"
	@echo "make fire    workers under load while everything around them is broken (DURATION=180 SEED=7, or STORE=sentinel, STORE=cluster)"
	@echo "make combinations  all options with each other, drawn by a machine (SEED=7 PROGRAMS=100, or REPLAY='...')"
	@echo "                   under another Celery with CELERY=5.4"
	@echo "make celery-suite  Celery's own tests with the lock and without it (twenty minutes)"
	@echo "make bench   what a lock costs, beside the others, in instructions and in time (twenty minutes; needs valgrind)"
	@echo "make scenarios  what goes wrong, with each library (four minutes)"
	@echo "make scale   what one process and one worker can carry (ten minutes)"
	@echo "make compare write the comparison, README's table of it and docs/reference/scale.md"
	@echo "make seen    write docs/reference/what-you-see.md (half a minute)"
	@echo "make page    the page of the locks in a real browser, and its pictures for the docs (needs chromium)"
	@echo "make docs    the site, in build/site; a dead link is an error (under a minute)"
	@echo "make dist    sdist and wheel, built twice to the same bytes, checked, and installed"
	@echo "make lint    ruff, mypy, and what users write under two type checkers"

demo: $(VENV)/.example
	$(BIN)/python -m example_project.demo

# If the demo fails, the picture stays as it was.
picture: demo
	cp example_project/out/timeline.svg docs/timeline.svg

tickets: $(VENV)/.example
	$(BIN)/python -m example_project.tickets

test: $(VENV)/.develop
	$(BIN)/python -m pytest $(ABREAST) $(ARGS)

prove: depth $(PARTS) seeds
	$(MAKE) matrix CELERY=5.4
	$(MAKE) clients

depth: $(VENV)/.develop
	$(BIN)/python -m pytest $(ABREAST) -m "prove and not nightly" $(ARGS)

endings: ABREAST := --numprocesses=2 --dist=loadgroup
$(PARTS): $(VENV)/.develop
	$(BIN)/python -m pytest $(if $(filter $@,$(ALONE)),$(PATIENT),$(ABREAST)) -m "not nightly" tests/$@ $(ARGS)

seeds: $(VENV)/.develop
	$(BIN)/python -m pytest $(PATIENT) -m "not nightly" tests/fire tests/combinations tests/celery_suite $(ARGS)

nightly: prove matrix page
	$(BIN)/python -m pytest $(ABREAST) $(PATIENT) -m nightly tests
	for seed in $(SEEDS); do \
	  $(MAKE) fire SEED=$$seed && $(MAKE) fire SEED=$$seed STORE=sentinel && \
	  $(MAKE) fire SEED=$$seed STORE=cluster && $(MAKE) combinations SEED=$$seed PROGRAMS=300 || exit; \
	done

matrix: $(VENV)/.matrix
	$(BIN)/nox $(if $(CELERY),--session "celery($(CELERY))") -- $(ARGS)

clients: $(VENV)/.matrix
	$(BIN)/nox --session "clients$(if $(REDIS),($(REDIS)))" -- $(ARGS)

fire: $(VENV)/.develop
	$(BIN)/python -m tests.fire $(DURATION:%=--duration %) $(SEED:%=--seed %) $(STORE:%=--store %) $(ARGS)

# An environment variable, because a program is full of quotes.
combinations: export COMBINATIONS_REPLAY := $(REPLAY)
combinations: COMBINE := $(if $(CELERY),$(BIN)/nox --session "combinations($(CELERY))" --,$(BIN)/python -m tests.combinations)
combinations: $(if $(CELERY),$(VENV)/.matrix,$(VENV)/.develop)
	$(COMBINE) $(SEED:%=--seed %) $(PROGRAMS:%=--programs %) $(ARGS)

celery-suite: $(VENV)/.develop
	$(BIN)/python -m pytest -m nightly tests/celery_suite $(ARGS)

seen: $(VENV)/.develop
	WRITE_DOCS=1 $(BIN)/python -m pytest -m prove tests/acceptance/test_what_you_see.py $(ARGS)

page: $(VENV)/.develop
	WRITE_DOCS=1 $(BIN)/python -m pytest tests/page $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.instructions --out $(RESULTS)/instructions.json
	$(BIN)/python -m benchmarks.locks --out $(RESULTS)/locks.json $(ARGS)
	$(BIN)/python -m benchmarks.tasks --out $(RESULTS)/tasks.json $(ARGS)
	$(BIN)/python -m benchmarks.bursts

scenarios: $(VENV)/.bench
	$(BIN)/python -m benchmarks.scenarios --out $(RESULTS)/scenarios.json $(ARGS)

scale: $(VENV)/.bench
	$(BIN)/python -m benchmarks.scale --out $(RESULTS)/scale.json $(ARGS)

compare: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(TOOLS)/.ready
	$(TOOLS)/bin/mkdocs build --strict $(ARGS)

dist: $(TOOLS)/.ready $(VENV)/.develop
	rm -rf dist build/again
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/python -m build --outdir build/again
	diff --recursive dist build/again
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl
	$(BIN)/python -m pytest tests/test_packaging.py $(ARGS)

lint: $(VENV)/.develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/typing $(ARGS)

format: $(VENV)/.develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .nox build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A virtual environment. Debian's python3 has no ensurepip, so the machine's pip installs into it.
define environment
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import importlib.util, sys; importlib.util.find_spec("pip") or sys.exit("pip is missing for $(PYTHON); on Debian: apt-get install python3-pip")'
	@$(PYTHON) -c 'import pip, sys; [int(part) for part in pip.__version__.split(".")[:2]] >= [22, 3] or sys.exit("pip 22.3 or newer is needed, and $(PYTHON) has " + pip.__version__ + "; get it: $(PYTHON) -m pip install --upgrade pip")'
	$(PYTHON) -m venv --without-pip $(1)
	$(PYTHON) -m pip --quiet --disable-pip-version-check --python $(1) install "pip>=25.1"
endef

$(BIN)/pip:
	$(call environment,$(VENV))

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
	$(call environment,$(TOOLS))
	$(TOOLS)/bin/pip install --quiet --group docs --group release
	@touch $@
