# The first command on a fresh machine may be any of these: .venv is made when it is missing.

PYTHON ?= python3
# torch goes in first and by version: a CPU build of exactly this one may lie on disk, where "any
# torch" would be a large download. `make TORCH=torch` takes the newest.
TORCH ?= torch==2.13.0
# A CUDA build of several GB, for the simulated CUDA alone: the one with which it was tried.
TORCH_CUDA ?= torch==2.11.0

BIN := .venv/bin
PIP := -m pip --quiet --quiet --disable-pip-version-check
# The first pip that reads dependency groups; the one that venv brings may be older.
NEWER_PIP := --upgrade "pip>=25.1"
MAKEFLAGS += --no-print-directory
# Tests start many processes. Each would compile all sources again where a machine forbids bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick coverage test-injected frameworks lint format stress montecarlo simcuda \
	docs dist wheel-test clean

demo: .venv/installed
	@$(BIN)/python -m elastic_mbs demo

test: .venv/installed
	@$(BIN)/python -m pytest --quiet --numprocesses=auto --dist=worksteal

# The rooms that know nothing of the engine, and the promises that a change breaks first: less than
# a minute on two cores.
QUICK := tests/batch tests/controller tests/memory tests/sinks \
	$(addprefix tests/promises/test_,exact.py once.py whole.py)

quick: .venv/installed
	@$(BIN)/python -m pytest --quiet --numprocesses=2 $(QUICK)

# All tests with branch coverage and its floor. Takes three quarters more time, so it is no part of
# CI.
coverage: .venv/installed
	@$(BIN)/python -m pytest --quiet --numprocesses=auto --cov --cov-report=term

# The tests marked `injectable`, with out-of-memory errors at random places inside guarded attempts
# (elastic_mbs.testing). SEED=N for other places.
SEED ?= 20

test-injected: .venv/installed
	@$(BIN)/python -m pytest --quiet --numprocesses=auto \
		-m "injectable and not no_oom_injection" \
		--oom-injection=random --oom-injection-seed=$(SEED)

# The integrations and their example scripts, in an environment that has the trainers.
frameworks: .venv-frameworks/installed
	@OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest --quiet tests/integrations

# Every scenario on counted tensors with few steps, and some under each limit that the machine
# itself can set.
stress: .venv/installed
	@$(BIN)/python -m stress --quick

# Random cases, the same each time; `python -m stress montecarlo` alone draws others.
montecarlo: .venv/installed
	@$(BIN)/python -m stress montecarlo --runs 150 --seed 1

# The tests and the stress tool on a simulated GPU: torch's own CUDA allocator without a card
# (stress/limits/simcuda).
simcuda: .venv-simcuda/installed
	@.venv-simcuda/bin/python -m pytest --quiet --simcuda -m gpu
	@.venv-simcuda/bin/python -m stress --kind simcuda --quick
	@.venv-simcuda/bin/python -m stress montecarlo --kind simcuda --runs 100 --seed 1

lint: .venv/installed
	@$(BIN)/ruff check --quiet . tools/gpu_check
	@$(BIN)/ruff format --quiet --check . tools/gpu_check
	@$(BIN)/mypy --no-error-summary
	@found=$$($(BIN)/lint-imports --no-logo) || { echo "$$found"; exit 1; }

# Into site/. Strict: a dead link or an unknown name fails.
docs: .venv/installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: .venv/installed
	@$(BIN)/ruff check --quiet --fix . tools/gpu_check
	@$(BIN)/ruff format --quiet . tools/gpu_check

# The source distribution and the wheel.
dist: .venv/installed
	@rm -rf dist
	@found=$$($(BIN)/python -m hatchling build 2>&1) || { echo "$$found"; exit 1; }

# A clean environment, an empty folder, and nothing of the working tree on the path. The sources of
# C and C++ are in the source distribution alone.
wheel-test: dist
	@tar --list --gzip --file dist/*.tar.gz | grep --quiet /stress/limits/fence.c
	@set -eu; here=$$(mktemp -d); trap 'rm -rf "$$here"' EXIT; \
	$(PYTHON) -m venv "$$here/venv"; \
	"$$here/venv/bin/python" $(PIP) install "$(TORCH)"; \
	"$$here/venv/bin/python" $(PIP) install dist/*.whl; \
	mkdir "$$here/cwd"; cp tools/wheel_smoke.py "$$here/cwd"; \
	cd "$$here/cwd"; "$$here/venv/bin/python" wheel_smoke.py; \
	"$$here/venv/bin/elastic-mbs" --help > help.txt

clean:
	@rm -rf .venv .venv-frameworks .venv-simcuda build dist site .coverage .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.venv-simcuda/installed: pyproject.toml
	@echo "making .venv-simcuda (gigabytes)"
	@$(PYTHON) -m venv .venv-simcuda
	@.venv-simcuda/bin/python $(PIP) install $(NEWER_PIP)
	@.venv-simcuda/bin/python $(PIP) install "$(TORCH_CUDA)"
	@.venv-simcuda/bin/python $(PIP) install --editable ".[hf]" --group dev
	@touch $@

.venv-frameworks/installed: pyproject.toml
	@echo "making .venv-frameworks (about a minute)"
	@$(PYTHON) -m venv .venv-frameworks
	@.venv-frameworks/bin/python $(PIP) install $(NEWER_PIP)
	@.venv-frameworks/bin/python $(PIP) install "$(TORCH)"
	@.venv-frameworks/bin/python $(PIP) install --editable . --group test --group frameworks
	@touch $@

.venv/installed: pyproject.toml
	@echo "making .venv (about a minute)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP) install $(NEWER_PIP)
	@$(BIN)/python $(PIP) install "$(TORCH)"
	@$(BIN)/python $(PIP) install --editable . --group dev
	@touch $@
