# make train   the main job, on 2 ranks of this machine      make test   the tests, as CI runs them
# make grid    every cell of the grids of tests               make bench  stretto beside DDP and FSDP2
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test grid bench lint clean

# Installed again only when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

train: $(VENV)/installed
	$(BIN)/stretto train tiny

test: $(VENV)/installed
	$(BIN)/python -m ruff check stretto tests benchmarks examples
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not grid"

grid: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

bench: $(VENV)/installed
	$(BIN)/python benchmarks/step.py

lint: $(VENV)/installed
	$(BIN)/python -m ruff check --fix stretto tests benchmarks examples

clean:
	rm -rf $(VENV) build *.egg-info
