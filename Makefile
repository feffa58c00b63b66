# Everything a fresh machine needs, into .venv. A stamp says what is installed; it goes stale when pyproject.toml changes.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2
BASE ?= HEAD
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help serve test lint check chaos bench bench-compare bench-peers clean

help: ## this list
	@echo "make serve    install, fetch the model if it is not there, serve it on http://$(HOST):$(PORT) (HOST, PORT, MODEL, ARGS)"
	@echo "make test     install what the tests need, fetch the demo model, run the tests (ARGS goes to pytest)"
	@echo "make lint     format, lint and types"
	@echo "make check    format, lint, types and the control plane's tests: fast, and no model"
	@echo "make chaos    minutes of 32 clients of every kind against one small server, faults planted (ARGS=--minutes 5)"
	@echo "make bench    measure decode, prefill and the mixed workload on this machine (MODEL, ARGS)"
	@echo "make bench-compare  is the working tree faster or slower than the commit BASE? (BASE, MODEL, ARGS; ARGS=--quick)"
	@echo "make bench-peers  millpond beside llama.cpp, OpenVINO GenAI and vLLM, each set up first (MODEL, ARGS; ARGS=--quick)"
	@echo "make clean    remove the virtual environments and the caches of the tools (fetched models stay)"
	@echo ""
	@echo "PYTHON=python3.12 chooses the interpreter that .venv is made with; 3.11 or newer, found now: $$($(PYTHON) -V 2>&1)"

serve: .venv/.installed
	@$(BIN)/millpond pull "$(MODEL)"
	@exec $(BIN)/millpond serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

test: .venv/.installed-test
	@$(BIN)/millpond pull smollm2
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/lint

check: .venv/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

chaos: .venv/.installed-test
	@PYTHONPATH=tests $(BIN)/python -m chaos $(ARGS)

bench: .venv/.installed
	@$(BIN)/millpond pull "$(MODEL)"
	@$(BIN)/millpond bench engine --model "$(MODEL)" $(ARGS)

bench-compare: .venv/.installed
	@$(BIN)/millpond pull "$(MODEL)"
	@$(BIN)/python -m bench.compare "$(BASE)" --model "$(MODEL)" $(ARGS)

bench-peers: .venv/.installed-test
	@$(BIN)/millpond pull "$(MODEL)"
	-@$(BIN)/python -m bench.peers setup --model "$(MODEL)"
	@$(BIN)/python -m bench.peers run --model "$(MODEL)" $(ARGS)

clean:
	rm -rf .venv .venv-reference .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: millpond needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1) (try: make PYTHON=python3.12 $(MAKECMDGOALS))" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.made pyproject.toml
	$(PIP) install --quiet --editable .
	@touch $@

.venv/.installed-test: .venv/.made pyproject.toml
	$(PIP) install --quiet --editable '.[test]'
	@touch $@ .venv/.installed

.venv/.installed-dev: .venv/.made pyproject.toml
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ .venv/.installed .venv/.installed-test
