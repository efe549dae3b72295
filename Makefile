# SlackServe. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The lock pins PyTorch's CPU build. It comes from a wheel under PIP_FIND_LINKS where there is one, and from
# PyTorch's own index otherwise.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
LOCAL_TORCH := $(wildcard $(addsuffix /torch-*+cpu*,$(PIP_FIND_LINKS)))
TORCH := $(if $(LOCAL_TORCH),,--torch-backend cpu)

ARGS ?=

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: serve
serve: $(READY) ## Serve the embedded model on CPU until Ctrl-C (ARGS="--config FILE" for another)
	@$(BIN)/slackserve serve $(ARGS)

.PHONY: test
test: $(READY) ## Run all tests
	$(BIN)/python -m pytest $(ARGS)

.PHONY: test-unit
test-unit: $(READY) ## Run the tests that need no engine, in seconds
	$(BIN)/python -m pytest tests/unit -m "not slow" $(ARGS)

.PHONY: check
check: $(READY) ## Lint, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

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
	PYTHONPATH=. $(BIN)/python -m benchmarks.engines.idle_overhead
	PYTHONPATH=. $(BIN)/python -m benchmarks.engines.stop_latency
	$(BIN)/python -m benchmarks.engines.vote
	$(BIN)/python -m benchmarks.cores.preemption_decision
	PYTHONPATH=. $(BIN)/python -m benchmarks.cores.preemption_rules

.PHONY: bench-routing
bench-routing: $(READY) ## Simulate the placement policies on eight replicas (ARGS="--trace FILE" for a trace too)
	PYTHONPATH=. $(BIN)/python -m benchmarks.cores.routing $(ARGS)

.PHONY: bench-sim
bench-sim: $(READY) ## Simulate every preset, and the traces in ARGS="--trace FILE": the tables of docs/benchmarks.md
	PYTHONPATH=. $(BIN)/python -m benchmarks.cores.simulation $(ARGS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.cores.offline_optimum
	$(BIN)/python -m benchmarks.cores.simulator_speed

.PHONY: bench-validate
bench-validate: $(READY) ## Hold the simulator against a real server on this machine
	PYTHONPATH=. $(BIN)/python -m benchmarks.engines.validation

.PHONY: bench-compare
bench-compare: $(READY) ## Compare with Ray Serve LLM's own prefill/decode application, in two to three hours
	$(BIN)/python -m benchmarks.comparison.run $(ARGS)

.PHONY: lock
lock: $(VENV)/.uv ## Compile requirements/cpu.lock anew
	$(BIN)/uv pip compile pyproject.toml --extra cpu --extra dev --override requirements/overrides.txt \
		--python-version 3.11 --no-emit-find-links --no-emit-index-url $(TORCH) -q -o requirements/cpu.lock

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "Python 3.11 is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (once, about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q uv
	@touch $@

# Bytecode is compiled once here: every replica imports some 10,000 modules, in several processes.
$(READY): requirements/cpu.lock pyproject.toml | $(VENV)/.uv
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --compile-bytecode $(TORCH) -r requirements/cpu.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@
