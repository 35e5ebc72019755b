# make demo    set everything up, run a real multi-rank job
# make test    set everything up, run lint, types and tests (what CI runs)
# make soak    the long version: more seeds, more kills, sanitizers for minutes
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types unit soak build clean help

help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile

$(VENV)/.ready: pyproject.toml constraints.txt scripts/preflight.sh
	@sh scripts/preflight.sh $(PYTHON)
	@echo "Setting up $(VENV) (torch is large; the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt --upgrade pip
	@$(PIP) -c constraints.txt scikit-build-core nanobind cmake ninja torch
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.9.0  # its interpreter tests the CUDA kernels
	@touch $@

SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/*.h csrc/*/*.cpp csrc/*/*.h)

$(VENV)/.built: $(VENV)/.ready $(SOURCES)
	@flock $(VENV)/.ready $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

build: $(VENV)/.built

demo: build
	@$(VENV)/bin/ringway demo

lint: build
	@$(VENV)/bin/ruff check src tests benchmarks examples scripts
	@$(VENV)/bin/ruff format --check src tests benchmarks examples scripts

types: build
	@$(VENV)/bin/mypy

unit: build
	@$(PY) -m pytest -q -n 2 --dist loadfile

test: lint types unit

soak: build
	@RINGWAY_SOAK=1 $(PY) -m pytest -q

clean:
	@rm -rf build $(VENV)/.built

# make ccl-proof  the ccl backend on the real oneCCL (x86_64), written to docs/proofs/ccl.md
# make proofs     the proofs that are older than the code they prove
.PHONY: ccl-proof proofs

ONECCL := .cache/oneccl/oneccl.tar.xz

$(ONECCL):
	@mkdir -p $(@D)
	@scripts/oneccl-gather $@

ccl-proof: build $(ONECCL)
	@PYTHON=$(abspath $(PY)) scripts/ccl_proof.sh $(ONECCL)

proofs:
	@$(PYTHON) scripts/proofs.py

# make torch-suite  torch's own suite for backends, on gloo and on shm, compared (minutes)
.PHONY: torch-suite

torch-suite: build
	@$(PY) -c 'import expecttest' 2>/dev/null || $(PIP) expecttest==0.3.0  # torch's test classes import it
	@$(PY) scripts/torch_suite.py
