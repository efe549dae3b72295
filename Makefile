# SlackServe. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The lock pins PyTorch's CPU build. It comes from a wheel under PIP_FIND_LINKS where there is one, and from
# PyTorch's own index otherwise. pip separates directories by spaces, uv by commas.
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
COMMA := ,
export UV_FIND_LINKS ?= $(subst $(SPACE),$(COMMA),$(strip $(PIP_FIND_LINKS)))
LOCAL_TORCH := $(wildcard $(addsuffix /torch-*+cpu*,$(PIP_FIND_LINKS)))
TORCH := $(if $(LOCAL_TORCH),,--torch-backend cpu)

ARGS ?=

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: serve
serve: $(READY) ## Serve the embedded model on CPU until Ctrl-C (ARGS="--config FILE" for another)
	@$(BIN)/slackserve serve $(ARGS)

# Files of tests run beside each other, those that start engines first; what needs the machine to itself follows,
# one test at a time, and is none of the tests of units and engines, which take long to collect. A phase that
# fails is the last one. pytest's status 5, no test, counts only if ARGS selects none in either phase.
BESIDE := -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder
pytest = $(BIN)/python -m pytest -m $(1) $(ARGS); status=$$?; \
	[ $$status -eq 0 ] && result=0; [ $$status -eq 0 ] || [ $$status -eq 5 ] || exit $$status
phases = @result=5; $(call pytest,"$(1) and not (serial or e2e)" $(BESIDE)); \
	$(call pytest,"$(1) and (serial or e2e)" --ignore=tests/unit --ignore=tests/engine); exit $$result

.PHONY: test
test: $(READY) ## Run all tests but the long ones (ARGS="-k name", or paths, to choose)
	$(call phases,not (long or nightly))

.PHONY: test-long
test-long: $(READY) ## Run the soaks, the statistical tests and those with fleets of their own
	$(call phases,long and not nightly)

.PHONY: test-nightly
test-nightly: $(READY) ## Run the failures and upgrades that take too long for every change
	$(call phases,nightly)

.PHONY: test-unit
test-unit: $(READY) ## Run the tests that need no engine, in seconds
	$(BIN)/python -m pytest $(BESIDE) tests/unit -m "not (slow or long or nightly)" $(ARGS)

.PHONY: check
check: $(READY) ## Lint, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/mypy & types=$$!; $(BIN)/lint-imports; layers=$$?; wait $$types && exit $$layers

.PHONY: fmt
fmt: $(READY) ## Format the code and mend what can be mended by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: bench
bench: $(READY) ## Measure the serving path and the router; JSON in benchmarks/results
	$(BIN)/python -m benchmarks.cores.router_decision
	$(BIN)/python -m benchmarks.engines.serving_path

.PHONY: bench-preempt
bench-preempt: $(READY) ## Measure preemption: the whole server, idle boundaries, votes, the rules
	$(BIN)/python -m benchmarks.engines.preemption
	$(BIN)/python -m benchmarks.engines.idle_overhead
	$(BIN)/python -m benchmarks.engines.stop_latency
	$(BIN)/python -m benchmarks.engines.compiled
	$(BIN)/python -m benchmarks.engines.vote
	$(BIN)/python -m benchmarks.cores.preemption.decision
	$(BIN)/python -m benchmarks.cores.preemption.rules

.PHONY: bench-routing
bench-routing: $(READY) ## Simulate the placement policies on eight replicas (ARGS="--trace FILE" for a trace too)
	$(BIN)/python -m benchmarks.cores.placement.routing $(ARGS)

.PHONY: bench-sim
bench-sim: $(READY) ## Simulate every preset, and the traces in ARGS="--trace FILE"
	$(BIN)/python -m benchmarks.cores.simulation $(ARGS)
	$(MAKE) bench-optimum ARGS=
	$(BIN)/python -m benchmarks.cores.simulator_speed

# SciPy lies beside the other packages, not among them: where it is installed, vLLM and transformers import it into
# every process, a fifth of what a start takes.
.PHONY: bench-optimum
bench-optimum: $(READY) ## Compute how far any scheduler could get (ARGS="--trace FILE" for a trace)
	$(BIN)/uv pip install -q --python $(BIN)/python --target $(VENV)/optimum --no-deps "scipy>=1.14"
	PYTHONPATH=$(VENV)/optimum $(BIN)/python -m benchmarks.cores.offline_optimum $(ARGS)

.PHONY: bench-validate
bench-validate: $(READY) ## Hold the simulator against a real server on this machine
	$(BIN)/python -m benchmarks.engines.validation

.PHONY: bench-failures
bench-failures: $(READY) ## Make failures happen and measure what clients see (ARGS="-k name" for some)
	$(BIN)/python -m benchmarks.engines.failures $(ARGS)

.PHONY: bench-decode
bench-decode: $(READY) ## Have a decode engine run out of memory, vLLM's ways to bear it and ours, in half an hour
	$(BIN)/python -m benchmarks.engines.decode.pressure $(ARGS)

.PHONY: bench-compare
bench-compare: $(READY) ## Compare with Ray Serve LLM's own prefill/decode application, in two to three hours
	$(BIN)/python -m benchmarks.comparison.run --layers 5 --loads 0.7,0.9 --rounds 2 --urgent-ms 500 \
		--long-ms 12000 $(ARGS)

.PHONY: tables
tables: $(READY) ## Make the documentation's tables anew from benchmarks/results
	$(BIN)/python -m benchmarks.doc_tables

.PHONY: proto
proto: $(READY) ## Generate the gRPC API's code from proto/ anew
	$(BIN)/python -m grpc_tools.protoc -I deployments/grpc=proto --python_out=. --pyi_out=. \
		--grpc_python_out=. deployments/grpc/inference.proto

.PHONY: lock
lock: $(READY) ## Compile requirements/cpu.lock anew
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/overrides.txt \
		--python-version 3.11 --no-emit-find-links --no-emit-index-url $(TORCH) -q -o requirements/cpu.lock

.PHONY: observability
observability: $(READY) ## Generate the rules and dashboards of observability/ for the default tiers
	$(BIN)/slackserve observability $(ARGS)

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(READY): requirements/cpu.lock pyproject.toml
	@requirements/install.sh $(VENV)
