# `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-models lint readme clean

demo: $(STAMP)
	$(BIN)/ikbo demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2

test-models: $(STAMP)
	$(BIN)/python -m pip install -q --no-deps -r requirements/models.txt
	$(BIN)/python -m pytest -q tests/models

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

readme: $(STAMP)
	$(BIN)/python tools/readme_pictures.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
