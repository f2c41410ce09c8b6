VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
BENCH_STAMP := $(VENV)/.bench-stamp

.PHONY: demo test coverage lint bench clean

# Flips labels of digits, finds them, and writes demo/report.html.
demo: $(STAMP)
	$(BIN)/persample demo --out demo

# Two workers, one thread each; tells what was skipped and why, such as the report where there is no browser.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

# The same, half as long again, with the lines that no test runs.
coverage: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Everything that is published in benchmarks/results, with its plots: some 20 minutes on a quiet machine.
bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks

# The environment stays: remove it by hand to set up from scratch.
clean:
	rm -rf build dist demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch first and by its exact version: a range could pull another build of it, gigabytes of CUDA included.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,demo,lint]'
	touch $@

# The peers; torch stays what it is. BackPACK lists torchvision, a build for another torch that nothing here imports: it
# is installed without its dependencies, and the two that it needs are in the extra.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps backpack-for-pytorch
	touch $@
