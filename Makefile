# Two commands: `make demo` and `make test`. Both make .venv if need be, and need Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	rm -rf runs/demo
	$(BIN)/fineprune compare recipes/digits.toml --out runs/demo --seeds 3 --jobs 2

# Two processes, since most tests of workers and servers wait; a file's tests share one Ray.
test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs

# torch first and alone: on machines without a GPU the pinned version is then all that is fetched.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fineprune needs Python >= 3.11; give one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)
