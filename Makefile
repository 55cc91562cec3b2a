PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-slow gpu-test bench results format clean

# Train a self-normalizing flow and its exact-gradient twin on handwritten digits, and compare their exact likelihoods.
run: .venv/ready
	$(BIN)/selfnorm train digits-fc-snf --twin

# Everything that CI checks: style, types, tests.
test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto --maxprocesses 4 --dist worksteal -m 'not slow'

# The tests that take too long for every change; their numbers are kept in results/.
test-slow: .venv/ready
	$(BIN)/pytest -q -n auto --maxprocesses 4 --dist worksteal -m slow --counts=results/slow_tests.json
	$(MAKE) results

# The tests that need an accelerator, on a machine that has one.
gpu-test: .venv/ready
	@$(BIN)/python -c 'import sys, torch; torch.accelerator.is_available() or sys.exit("gpu-test: expected an accelerator, got none")'
	$(BIN)/pytest -q -m 'gpu and not slow' --counts=results/gpu_tests.json
	$(MAKE) results

bench: .venv/ready
	for script in layers emerging norm digits_twins stability drift kills loop_overhead training_memory; do $(BIN)/python benchmarks/$$script.py || exit 1; done

# RESULTS.md, from results/.
results: .venv/ready
	$(BIN)/python -m selfnorm.report.results

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

# Made again whenever its contents change.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("selfnorm needs Python 3.11 or newer, got " + sys.version.split()[0] + "; name another as: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
