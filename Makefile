PYTHON := python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.demo-stamp
STAMP := $(VENV)/.stamp
BENCH_STAMP := $(VENV)/.bench-stamp

.PHONY: demo test quick coverage lint docs package check-package bench clean

# Flip labels of digits, find them, and write demo/report.html.
demo: $(DEMO_STAMP)
	$(BIN)/persample demo --out demo

# Two workers with one thread each; the tests in two processes run in one worker, which starts these processes once.
# -rs: list what was skipped and why (the report needs a browser).
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -rs

# The files with the marker `quick`: some of each part, in two minutes.
quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m quick $$(grep -rl "pytest.mark.quick" tests --include="test_*.py")

# All tests with a list of lines that no test runs; takes 1.5 times as long.
coverage: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --cov

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/measures.py --totals
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs src benchmarks examples

# The documentation: site/index.html opens in a browser, without a server or a network.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# The files of a release, in dist/.
package: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[package]'
	rm -rf dist
	$(BIN)/python -m build -q
	$(BIN)/twine check --strict dist/*

# Install the wheel into new environments, and run the README there.
check-package: package
	$(BIN)/python tools/check_package.py

# Measure everything in benchmarks/results again, with its plots: about 25 minutes on a quiet machine.
bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks
	for part in varied host first_steps coverage monitor; do $(BIN)/python -m benchmarks.$$part --write || exit 1; done
	$(BIN)/python -m benchmarks --plot

# The environment is kept; remove .venv to set up from scratch.
clean:
	rm -rf build dist demo site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# What the demo needs. torch first, by its exact version: a range could pull another build with gigabytes of CUDA.
$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $@

# What the tests need, in the same environment.
$(STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,lint]'
	touch $@

# The peers; torch stays as it is. BackPACK requires torchvision, which would pull another torch and is not needed here:
# BackPACK is installed without its dependencies, and the two that it needs are in the extra.
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps backpack-for-pytorch
	touch $@
