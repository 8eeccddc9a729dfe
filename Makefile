# `make demo`, `make test`, `make bench`, `make accuracy`, `make approximations`: each makes .venv if it is missing.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench accuracy approximations lint types notebooks clean

demo: .venv/installed
	$(BIN)/python -W ignore::FutureWarning examples/demo.py

test: .venv/installed
	$(BIN)/python -m pytest -n 2

bench: .venv/installed-bench
	$(BIN)/python benchmarks/run.py

accuracy: .venv/installed
	$(BIN)/python benchmarks/accuracy/run.py

approximations: .venv/installed-bench
	$(BIN)/python -W ignore benchmarks/approximations/run.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

notebooks: .venv/installed
	$(BIN)/python -m pytest --nbmake notebooks/*.ipynb

clean:
	rm -rf .venv demo-output

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@
