# make train   the main job, on 2 ranks of this machine      make test   the tests, as CI runs them
# make grid    every cell of the grids of tests               make bench  stretto beside DDP and FSDP2
# make frameworks   what needs other frameworks: their rows of compare, exports by their own parsers; installs them, takes minutes
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test grid frameworks bench lint clean

# Installed again only when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

train: $(VENV)/installed
	$(BIN)/stretto train tiny

# pages are looked at in Chromium where there is one: apt-get install chromium chromium-driver
test: $(VENV)/installed
	$(BIN)/python -m ruff check stretto tests benchmarks examples
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not grid and not frameworks"

grid: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not frameworks"

# exports by the parsers of those they are for, and runs on Ray; MEGATRON_LM=FOLDER names a checkout of core_v0.16.1
frameworks: $(VENV)/installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --editable '.[deepspeed,megatron,ray,accelerate]' torchtitan==0.2.2 triton six
	$(BIN)/python -m pytest -m frameworks

bench: $(VENV)/installed
	$(BIN)/python benchmarks/step.py

lint: $(VENV)/installed
	$(BIN)/python -m ruff check --fix stretto tests benchmarks examples

clean:
	rm -rf $(VENV) build *.egg-info
