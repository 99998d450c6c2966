# Two commands: `make demo` and `make test`. Everything lives in .venv; nothing outside it but the model cache is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when first imported: compiling every file of torch and transformers takes longer than it saves.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
WORKERS ?= 2

.PHONY: demo test lint install install-dev clean

demo: $(VENV)/.installed
	$(BIN)/ternary-probe demo --out demo-report

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: it is the one pinned requirement, and a later step must find it satisfied.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-report
