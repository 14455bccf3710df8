# Every target sets up what it needs. PYTHON is the interpreter that makes the virtual environment (3.11 or newer).
PYTHON ?= python3
# The torch to install. On Linux this is a CUDA build of several GB; for the CPU build set PIP_EXTRA_INDEX_URL to PyTorch's
# index of CPU wheels before the first run.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(abspath $(VENV)/bin)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(abspath $(VENV))/.installed
# The CPU kernels of the worker. Installing builds them; this rule builds them again when their sources change, because the
# worker refuses a library of other sources. Without a C++ compiler it says so and the worker uses torch's slower code.
KERNELS := gpu_worker/kernels/cpu_kernels.so
KERNEL_SOURCES := $(wildcard gpu_worker/kernels/*.cpp gpu_worker/kernels/*.h) gpu_worker/kernels/build.py

.DEFAULT_GOAL := help
.PHONY: help demo up test test-fast lint lint-types lint-imports lint-ruff lint-protos fmt kernels protos protos-check bench-core bench-engine bench-speculation bench-recovery bench-fairness bench-retention bench-stores gpu-check chaos chaos-mutation clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(READY): pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) --editable '.[dev]'
	touch $@

$(KERNELS): $(KERNEL_SOURCES) | $(READY)
	$(BIN)/python -m gpu_worker.kernels.build

demo: $(READY) $(KERNELS) ## pull the small model, start everything, stream one answer, show its trace, stop everything
	$(BIN)/sluice demo

up: $(READY) $(KERNELS) ## run the whole stack on this machine until Ctrl-C
	$(BIN)/sluice up

test: $(READY) $(KERNELS) ## all tests, in two processes side by side; starts every server it needs
	$(BIN)/python -m tests

test-fast: $(READY) $(KERNELS) ## tests without separate processes and without the real model
	$(BIN)/pytest tests/unit tests/contract tests/stateful

TRIALS ?= 200
SEED ?= 1
ENGINE ?= sim
FAULTS ?= all
bench-core: $(READY) ## how the engine's core behaves on the small real model, each figure with its limit
	$(BIN)/sluice models pull smollm2-135m-instruct
	$(BIN)/python -m bench.engine_core

bench-engine: $(READY) $(KERNELS) ## how fast the engine is alone, through gRPC, and beside the peers in SLUICE_BENCH_PEERS: ONLY="32 one", ARGS=...
	$(BIN)/sluice models pull smollm2-135m-instruct
	test -d .sluice/models/smollm2-135m-instruct-int8 || $(BIN)/sluice models quantize smollm2-135m-instruct
	$(BIN)/python -m bench.engine $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench-speculation: $(READY) $(KERNELS) ## what speculation gains at 1 and costs at 32 requests, each figure with its limit: ARGS="--only one --threads 1"
	$(BIN)/sluice models pull smollm2-135m-instruct
	test -d .sluice/models/smollm2-135m-instruct-int8 || $(BIN)/sluice models quantize smollm2-135m-instruct
	$(BIN)/python -m bench.speculation $(ARGS)

bench-recovery: TRIALS = 30
bench-recovery: $(READY) ## how long streams pause when a process dies or hangs, each figure with its limit: TRIALS=30
	$(BIN)/python -m bench.recovery --trials $(TRIALS) --seed $(SEED)

ROWS ?= 5000000
bench-retention: $(READY) ## what many rows cost: plans of the hot statements, the purge of a day, each with its limit: ROWS=5000000
	$(BIN)/python -m bench.retention --rows $(ROWS)

bench-fairness: $(READY) ## how fairly and safely tenants share, each figure with its limit: SEED=1, ONLY="weights light"
	$(BIN)/python -m bench.fairness --seed $(SEED) $(if $(ONLY),--only $(ONLY))

bench-stores: $(READY) ## what failing stores and slow readers cost, each figure with its limit: SEED=1, ONLY="slow-reader reconnects"
	$(BIN)/python -m bench.stores --seed $(SEED) $(if $(ONLY),--only $(ONLY))

chaos: $(READY) ## random faults, exact checks: TRIALS=200 SEED=1 ENGINE=sim|real FAULTS=all|stores, or TRIAL=n to replay one
	$(BIN)/python -m tests.chaos --trials $(TRIALS) --seed $(SEED) --engine $(ENGINE) --faults $(FAULTS) $(if $(TRIAL),--trial $(TRIAL))

chaos-mutation: $(READY) ## plant known faults in a copy of the tree; the chaos trials must find each
	$(BIN)/python -m tests.chaos.mutation --seed $(SEED)

gpu-check: $(READY) ## run the GPU tests and measure a random 1B model on this machine's GPU, under six minutes: ARGS=--dry without one
	$(BIN)/python -m bench.gpu_check $(ARGS)

lint: $(READY) ## ruff, mypy strict, import rules, buf, side by side
	$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target lint-types lint-imports lint-ruff lint-protos protos-check

lint-types: $(READY)
	$(BIN)/mypy

lint-imports: $(READY)
	$(BIN)/lint-imports

lint-ruff: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-protos: $(READY)
	cd protos && $(BIN)/buf lint

fmt: $(READY) ## format and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

kernels: $(READY) ## compile the worker's CPU kernels again
	$(BIN)/python -m gpu_worker.kernels.build

protos: $(READY) ## regenerate protos/gen
	PATH="$(BIN):$$PATH" PYTHON=$(BIN)/python protos/generate.sh

protos-check: $(READY) ## fail when protos/gen is not what the .proto files say
	PATH="$(BIN):$$PATH" PYTHON=$(BIN)/python protos/check_generated.sh

clean: ## remove the virtual environment and caches; data under .sluice/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
