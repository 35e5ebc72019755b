# make demo       set everything up, run a real multi-rank job
# make quick      lint, types, unit tests, conformance of shm and gloo on 2 ranks: about 80 s, for the inner loop
#                 (110 s the first time, when mypy and Python have no caches)
# make test       lint, types and all tests (what CI runs); says which proofs are older than the code they prove
# make soak       hours: more seeds, kills and training steps, the conformance suite on more worlds and sub-groups, also
#                 under both MPIs, messages of more than 2 GB, tests that depend on time ten times, the suite on busy CPUs
# make sanitizers, make browser, make attack, make kills, make random_programs, make elastic_programs, make timing,
# make busy, make torch-versions
#                 what make test leaves out, written to docs/proofs
# make door-cost  what a job's secret costs, written to docs/proofs: needs a quiet machine
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check

# Without bytecode files, every process compiles ringway, and every worker of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test lint types unit soak build clean help

help:
	@sed -n 's/^# \(make.*\|    .*\)/\1/p' Makefile

$(VENV)/.ready: pyproject.toml constraints.txt scripts/preflight.sh
	@sh scripts/preflight.sh $(PYTHON)
	@echo "Setting up $(VENV) (torch is large; the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt --upgrade pip
	@$(PIP) -c constraints.txt scikit-build-core nanobind cmake ninja torch
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.9.0  # its interpreter tests the CUDA kernels
	@touch $@

SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

$(VENV)/.built: $(VENV)/.ready $(SOURCES)
	@echo "Compiling ringway's core and installing what its tests need (about 4 minutes of two cores)"
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

PYTEST := $(PY) -m pytest -q
# More tests at a time than two cores: about a third of the time, tests wait for a timeout, a death or a late rank.
SPREAD := -n 4 --dist worksteal
# Tests with their own target and their own page in docs/proofs.
APART  := not sanitizers and not browser

unit: build
	@$(PYTEST) $(SPREAD) -m '$(APART)'

# $(call checked,TESTS): lint, then these tests while mypy runs. What mypy says comes after them.
checked = \
	types=$$(mktemp) && trap 'rm -f $$types' EXIT && { $(VENV)/bin/mypy >$$types 2>&1 & } && \
	{ $(PYTEST) $(SPREAD) --durations=12 --durations-min=5 -m '$(1)'; tests=$$?; wait $$!; typed=$$?; cat $$types; [ $$tests = 0 ] && [ $$typed = 0 ]; }

test: lint
	@$(call checked,$(APART))
	@$(PY) scripts/proofs.py

# Tests that start no processes, or are marked quick. They hardly wait, so more of them at a time would not help.
quick: SPREAD := -n 2 --dist worksteal
quick: lint
	@$(call checked,quick or not (ranks or processes or sanitizers or browser))

soak: build
	@RINGWAY_SOAK=1 $(PYTEST)
	@$(PY) scripts/suite_proof.py timing
	@$(PY) scripts/suite_proof.py busy

.PHONY: sanitizers browser attack kills random_programs elastic_programs timing busy torch-versions

sanitizers browser attack kills random_programs elastic_programs timing busy: build
	@$(PY) scripts/suite_proof.py $@

.PHONY: door-cost

door-cost: build
	@$(PY) benchmarks/door_cost.py --check --rounds 40 --output docs/proofs/door_cost.md

TORCH_VERSIONS := 2.11.0 2.15.0

torch-versions: build
	@for version in $(TORCH_VERSIONS); do $(PY) scripts/suite_proof.py torch $$version || exit 1; done

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

# make wheels     wheels for manylinux_2_28 and the source distribution, in dist/ (about 2 minutes of two cores each)
# make wheel-test [SECCOMP=default.json]   the wheels that this machine can run, in a sandbox (root), compared with the
#                 native build
.PHONY: wheels wheel-test

wheels:
	@$(PYTHON) scripts/wheels.py

wheel-test: build
	@$(PY) scripts/wheel_test.py $(if $(SECCOMP),--seccomp $(SECCOMP))

# make docs       the documentation as a site, in build/site
.PHONY: docs

DOCS := .cache/docs

$(DOCS)/.ready: constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict && echo "wrote build/site/index.html"

# make screenshots  the pictures of top, report and bench in the documentation, by headless Chromium (2 minutes)
# make figures    the charts of the README, from the measurements in docs/figures
.PHONY: screenshots figures

screenshots: build
	@$(PY) scripts/screenshots.py

figures:
	@$(PYTHON) scripts/figures.py

# make torch-suite  torch's own suite for backends, on gloo and on shm, compared (minutes)
.PHONY: torch-suite

torch-suite: build
	@$(PY) -c 'import expecttest' 2>/dev/null || $(PIP) expecttest==0.3.0  # torch's test classes import it
	@$(PY) scripts/torch_suite.py

# make frameworks   accelerate, transformers, Lightning, Ray and DeepSpeed on gloo and on shm, compared (minutes)
.PHONY: frameworks

frameworks: build
	@$(PY) scripts/frameworks.py

# make vllm         vLLM on two CPU ranks, on its own shared memory and on ringway, compared, in docs/proofs (minutes)
.PHONY: vllm

vllm: build
	@$(PY) scripts/vllm_proof.py

# make deepspeed-tests CHECKOUT=path   DeepSpeed's own tests of its communication on ringway.compat; path is a checkout
#                 of DeepSpeed 0.19.6 (about an hour on two cores, 20 GB of memory)
.PHONY: deepspeed-tests

deepspeed-tests: build
	@$(PY) scripts/deepspeed_tests.py $(CHECKOUT)
