# `make demo`, `test`, `test-slow`, `test-long`, `matrix`, `bench`, `accuracy`, `untuned`, `verdicts`, `rows`, `approximations`, `networks`, `programs`, `distributed`, `calibration`, `docs`, `docs-test`, `wheel`: each makes .venv if it is missing.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-long matrix bench accuracy untuned verdicts rows approximations networks programs distributed calibration docs docs-test wheel lint types notebooks notebooks-small clean

demo: .venv/installed
	$(BIN)/python -W ignore::FutureWarning examples/demo.py

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes seconds a test, or starts processes: CI runs it, too.  What takes over 30 s is named.
test-slow: .venv/installed
	$(BIN)/python -m pytest -m "slow and not long and not site" -n 2 --dist loadfile --no-loadscope-reorder \
		--durations=0 --durations-min=30

# The repetitions, whole programs and long runs that both leave out.
test-long: .venv/installed
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile

# What touches ArviZ, with the newest one, on a newer Python.
MATRIX_PYTHON ?= python3.13
MATRIX_TESTS := $(addprefix tests/,infer/test_approximations.py infer/test_compare.py infer/test_nuts.py infer/test_nuts_faults.py infer/test_svgd.py \
	storage core/test_online_moments.py diagnostics/test_convergence.py diagnostics/test_loo.py \
	end_to_end/test_readme.py posterior/test_results.py posterior/test_round_trips.py)

matrix: .venv-matrix/installed
	.venv-matrix/bin/python -W ignore::FutureWarning examples/demo.py
	.venv-matrix/bin/python -m pytest -m "not long and not site" -n 2 $(MATRIX_TESTS)

bench: .venv/installed-bench
	$(BIN)/python benchmarks/run.py

accuracy: .venv/installed
	$(BIN)/python benchmarks/accuracy/run.py

untuned: .venv/installed
	$(BIN)/python benchmarks/accuracy/untuned.py
	$(BIN)/python benchmarks/accuracy/untuned.py --batches

verdicts: .venv/installed
	$(BIN)/python benchmarks/accuracy/verdicts.py

rows: .venv/installed
	$(BIN)/python benchmarks/accuracy/rows.py

approximations: .venv/installed-bench
	$(BIN)/python -W ignore benchmarks/approximations/run.py

networks: .venv/installed
	$(BIN)/python -W ignore benchmarks/networks/cost.py
	OMP_NUM_THREADS=2 $(BIN)/python -W ignore benchmarks/networks/cost.py
	$(BIN)/python -W ignore benchmarks/networks/digits.py
	$(BIN)/python -W ignore benchmarks/networks/laplaces.py
	$(BIN)/python -W ignore benchmarks/networks/ood.py
	$(BIN)/python -W ignore benchmarks/networks/uci.py
	$(BIN)/python -W ignore benchmarks/networks/untuned.py
	$(BIN)/python benchmarks/networks/report.py

programs: .venv/installed
	$(BIN)/python benchmarks/programs/run.py

distributed: .venv/installed
	$(BIN)/python benchmarks/distributed/run.py
	$(BIN)/torchrun --standalone --nproc-per-node=2 benchmarks/distributed/gradients.py
	$(BIN)/torchrun --standalone --nproc-per-node=2 benchmarks/distributed/cost.py
	$(BIN)/torchrun --standalone --nproc-per-node=2 benchmarks/distributed/rows.py

# What simuk's times need is not among the extras: `pip install simuk`.
calibration: .venv/installed-bench
	$(BIN)/python -W ignore benchmarks/calibration/verdicts.py
	$(BIN)/python -W ignore benchmarks/calibration/cost.py
	$(BIN)/python benchmarks/calibration/report.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy
	$(BIN)/python -m pytest -m long tests/contract/test_types.py

# As published, 35 minutes: before a change that touches them is closed.  Writes their outputs, less
# this machine's paths.
NOTEBOOKS := notebooks/*.ipynb notebooks/paper/*.ipynb

notebooks: .venv/installed
	printf '%s\n' $(NOTEBOOKS) | PYTHONWARNINGS=ignore:IProgress xargs -P 2 -n 1 \
		$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False
	perl -pi -e 's{"/\S+\.py:\d+: (?=\w+Warning)}{"}' $(NOTEBOOKS)

# Small, beside the results in notebooks/small: what CI runs.
notebooks-small: .venv/installed
	$(BIN)/python -m pytest -m site -n 2 tests/notebooks

# Builds the site into site/: open site/index.html, with or without a network.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The site in a browser, where Chromium is there, and every program on its pages.
docs-test: docs
	$(BIN)/python -m pytest -m site -n 2 tests/site

# The wheel as users install it: the demo runs on it, away from the checkout.
wheel: .venv/installed
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target dist/installed dist/*.whl
	cd dist && PYTHONPATH=installed ../$(BIN)/python -c \
		"import pathlib, pyro_scale; assert 'installed' in pathlib.Path(pyro_scale.__file__).parts"
	cd dist && PYTHONPATH=installed ../$(BIN)/python -W ignore::FutureWarning ../examples/demo.py

clean:
	rm -rf .venv .venv-matrix demo-output site build dist

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

.venv-matrix/installed: pyproject.toml
	$(MATRIX_PYTHON) -m venv .venv-matrix
	.venv-matrix/bin/python -m pip install --quiet torch==2.13.0 'arviz>=1'
	.venv-matrix/bin/python -m pip install --quiet --editable '.[demo,store,nuts]' \
		pytest pytest-xdist hypothesis torchmetrics torchdata
	touch $@
