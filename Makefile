# `make` or `make help` lists what there is. Everything lives in .venv and .local; `make clean` removes both.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Named by what is pinned and by which Python: a change of either makes the environment anew, a fresh checkout's file times do not.
PINNED := $(shell { cat requirements.txt requirements-dev.txt; $(PYTHON) --version; } 2>&1 | cksum | cut -d ' ' -f 1)
# Of `make serve`, e.g. for a second stack beside the first: make serve PORT=8081 DATA=.local2
PORT = 8080
DATA = .local
READY := $(VENV)/ready-$(PINNED)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test orchestrator bench check format lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## the virtual environment in .venv, from the pinned requirements

$(READY): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "this needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setup: installing the pinned requirements into $(VENV) (once; 20 s to 2 min, most of it downloads)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@

demo: $(READY) ## the whole story over HTTP: delivered, abandoned and recovered, dropped and redriven (2 min at most)
	@$(BIN)/python -m infra.local.demo

serve: $(READY) ## everything on this machine until Ctrl-C: Postgres, the functions, a cron (PORT=8080 DATA=.local)
	@$(BIN)/python -m infra.local --port $(PORT) --data $(DATA)

test: $(READY) ## all tests, on a Postgres of their own
	@$(BIN)/python -m pytest -n auto --maxprocesses 8

orchestrator: $(READY) ## dist/orchestrator.pyz: the program for an owner's machine, one file
	@$(BIN)/python -m infra.package.orchestrator dist/orchestrator.pyz

bench: $(READY) ## our times beside raw SQL's in the same run; also written to .local/bench.json
	@mkdir -p .local && $(BIN)/python -m tests.bench --json .local/bench.json

check: $(READY) ## formatting, lint, types, direction of dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## formats the code and fixes what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One resolution for all three files: what a function or an orchestrator runs with is what the tests ran with.
RESOLVE := pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate
lock: ## resolves pyproject.toml's dependency groups into the two requirements files anew (needs uv)
	@mkdir -p .local
	@uv $(RESOLVE) --group pyproject.toml:dev --output-file .local/all.txt
	@uv $(RESOLVE) --group pyproject.toml:functions --constraint .local/all.txt --output-file .local/functions.txt
	@uv $(RESOLVE) --group pyproject.toml:orchestrator --constraint .local/all.txt --output-file .local/orchestrator.txt
	@{ sed -n 1p orchestrator/requirements.txt; sed 's/ ;.*//' .local/orchestrator.txt; } > .local/orchestrator-requirements.txt
	@mv .local/orchestrator-requirements.txt orchestrator/requirements.txt
	@{ sed -n 1p requirements.txt; cat .local/functions.txt; } > .local/requirements.txt
	@{ sed -n 1,2p requirements-dev.txt; grep -vxFf .local/functions.txt .local/all.txt; } > .local/requirements-dev.txt
	@mv .local/requirements.txt .local/requirements-dev.txt .

clean: ## removes the environment, the local database and all caches
	@rm -rf $(VENV) .local dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
