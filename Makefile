# Every target makes the environment that it needs, from nothing but Python 3.11+ with pip.
#
#   make demo     the main job, played to its end on real processes
#   make serve    the example with its admin, until Ctrl-C
#   make test     the whole suite, on SQLite and on PostgreSQL
#   make test ARGS="tests/kernel -k codec"     a part of it
#   make chaos SECONDS=600 SEED=7    workers killed and PostgreSQL restarted for so long, then all accounted for
#   make bench    what loom costs, beside a bare driver loop; ARGS="--backend sqlite" for a part
#   make locks    the hunt for deadlocks on PostgreSQL, at full length
#   make outage   PostgreSQL away for a minute under a running worker
#   make check    what has to be clean before a change goes in, without the tests
#
# PYTHON=python3.13 chooses the interpreter, VENV=folder the environment, DJANGO="django~=6.0.0" the Django,
# JOBS=1 the number of test processes.

PYTHON ?= python3
VENV ?= .venv
DJANGO ?=
ARGS ?=
JOBS ?= logical

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadgroup

.PHONY: help demo serve test chaos bench locks outage check lint format types layers migrations-check docs wheel clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# $(call environment,folder): Debian's Python comes without what venv needs, so virtualenv stands in for it.
define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "loom_django needs Python 3.11 or newer, and $(PYTHON) is not." >&2; \
	    echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.13" >&2; exit 1; }; \
	if ! $(PYTHON) -m venv $(1) >/dev/null 2>&1; then \
	    echo "$(PYTHON) cannot make an environment by itself (Debian: python3-venv); trying virtualenv from PyPI"; \
	    rm -rf $(1) $(1).bootstrap; \
	    $(PYTHON) -m pip install --quiet --target $(1).bootstrap virtualenv && \
	    PYTHONPATH=$(1).bootstrap $(PYTHON) -m virtualenv --quiet $(1) || { rm -rf $(1) $(1).bootstrap; \
	        echo "No environment could be made. Install one of: python3-venv, python3-pip" >&2; exit 1; }; \
	    rm -rf $(1).bootstrap; \
	fi
endef

$(BIN)/python:
	@$(call environment,$(VENV))

$(VENV)/.has-%: pyproject.toml | $(BIN)/python
	@echo "installing what $* needs into $(VENV)"
	@$(PIP) install --editable '.[$*]' $(if $(DJANGO),'$(DJANGO)')
	@touch $@

demo: $(VENV)/.has-example
	@$(BIN)/python manage.py demo

serve: $(VENV)/.has-example
	@$(BIN)/python manage.py serve_demo

# Both passes run even if the first fails. Tests marked "once" touch no database and run in the first only.
test: $(VENV)/.has-test
	@$(BIN)/python -c 'import sys, django; print("Python", sys.version.split()[0], "with Django", django.__version__)'
	@export PYTHONDEVMODE=1; code=0; \
	echo "SQLite:"; \
	LOOM_TEST_DATABASE=sqlite $(PYTEST) $(ARGS) || code=$$?; \
	echo "PostgreSQL:"; \
	LOOM_TEST_DATABASE=postgresql $(BIN)/python -m tests.postgres run -- $(PYTEST) -m "not once" $(ARGS) || { \
	    second=$$?; [ -n "$(ARGS)" ] && [ $$second = 5 ] || code=$$second; }; \
	exit $$code

SECONDS ?= 600
SEED ?= 1
DATABASE ?= postgresql

# Scaled to the time: 200 flows a minute.
chaos: $(VENV)/.has-test
	@$(BIN)/python -m tests.chaos chaos --database $(DATABASE) --seconds $(SECONDS) --seed $(SEED) \
	    --flows $$(($(SECONDS) * 200 / 60))

bench: $(VENV)/.has-test
	@$(BIN)/python -m benchmarks $(ARGS)

locks: $(VENV)/.has-test
	@LOOM_TEST_OPERATIONS=10000 LOOM_TEST_DATABASE=postgresql $(BIN)/python -m tests.postgres run -- \
	    $(BIN)/python -m pytest tests/concurrency/test_lock_order.py --timeout 900

outage: $(VENV)/.has-test
	@LOOM_TEST_OUTAGE=60 LOOM_TEST_DATABASE=postgresql $(BIN)/python -m tests.postgres run -- \
	    $(BIN)/python -m pytest tests/concurrency/test_database_faults.py -k away_for_a_while --timeout 900

check: lint types layers migrations-check docs

lint: $(VENV)/.has-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/.has-dev
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

types: $(VENV)/.has-dev
	@$(BIN)/mypy

layers: $(VENV)/.has-dev
	@$(BIN)/lint-imports

migrations-check: $(VENV)/.has-dev
	@DJANGO_SETTINGS_MODULE=tests.settings LOOM_TEST_DATABASE=sqlite LOOM_TEST_SQLITE_PATH=$(VENV)/unused.sqlite3 \
	    $(BIN)/python -m django makemigrations --check --dry-run

docs: $(VENV)/.has-dev
	@$(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Built, looked into, and installed with what it depends on into an environment that has nothing else.
wheel: $(VENV)/.has-dev
	@rm -rf dist $(VENV)s/wheel
	@$(BIN)/python -m build
	@$(PYTEST) -n 0 tests/test_packaging.py
	@mkdir -p $(VENV)s
	@$(call environment,$(VENV)s/wheel)
	@$(VENV)s/wheel/bin/python -m pip --disable-pip-version-check --quiet install dist/*.whl
	@cd $(VENV)s/wheel && bin/python -I -c 'import loom_django; print("installed and imported:", loom_django.__version__)'

clean:
	@rm -rf .venv .venvs build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
