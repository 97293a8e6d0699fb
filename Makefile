# Everything a newcomer needs: `make demo` and `make test`. Both set up what they need
# under .venv and .cache on the first run; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SERVERS := .cache/triton/.ready .cache/kserve/.ready .cache/mlserver/.ready

# With a C compiler and Python's headers, the gateway is shown, tested and measured compiled. TENSORGATE_PURE=1 prevents it.
CAN_COMPILE := $(if $(filter-out 0,$(TENSORGATE_PURE)),,$(shell $(PYTHON) -c 'import os, shutil, sysconfig as s; \
  print("yes" * (shutil.which("cc") is not None and os.path.exists(s.get_path("include") + "/Python.h")))'))
COMPILED := $(if $(CAN_COMPILE),.cache/compiled/.ready)
# Compiled modules come before this checkout on Python's path; `python -m` would put the checkout first.
AS_COMPILED := $(if $(CAN_COMPILE),PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/.cache/compiled/site)
# What can differ from the sources, where numbers are read and written without the C module, and tests that only the sources can run.
ROOMS_OF_SOURCES := tests/codec tests/http1 tests/http2 tests/proxy
TESTS_OF_SOURCES = $(ROOMS_OF_SOURCES) $(filter-out $(ROOMS_OF_SOURCES:=/%),$(sort $(shell grep -rl needs_source tests --include 'test_*.py')))
# Those of an installed wheel: what is compiled, and the whole gateway from outside.
TESTS_OF_WHEELS := tests/codec tests/http1 tests/http2 tests/listener tests/upstream tests/proxy tests/observe tests/offload tests/cli \
  tests/end_to_end/connections tests/end_to_end/routing tests/end_to_end/limits

# Processes that run tests: two for each core, as tests wait longer than they compute.
PROCESSES ?= $(shell expr $$(nproc) \* 2)
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES)

# Without bytecode, each of the hundreds of processes that tests start would compile the gateway again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-compiled test-sources test-system wheels test-wheels fuzz mutants soak lint format schema descriptors docs bench triton clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.demo-ready $(COMPILED) ## Start a demo server with the gateway in front and show six example calls
	@$(AS_COMPILED) $(BIN)/tensorgate demo $(ARGS)

# What ships is compiled, so that is what is tested; with ARGS, the sources, which need no compiling after each change.
test: $(if $(ARGS),test-sources,$(if $(CAN_COMPILE),test-compiled)) ## Run all tests but test-system once, compiled (ARGS= for pytest: from the sources)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-sources $(if $(CAN_COMPILE),TENSORGATE_TEST_SCALE=0.05 ARGS="$(TESTS_OF_SOURCES)"))

test-all: export TENSORGATE_TEST_SCALE = 1
test-all: test-compiled test-sources ## Run all tests whole, compiled and from the sources, the fuzzers and the soak: before a release
	@$(MAKE) --no-print-directory test-system fuzz soak ARGS=

test-compiled: .venv/.test-ready $(SERVERS) .cache/perf_analyzer/.ready $(COMPILED) ## Run all tests but test-system compiled (ARGS= for pytest)
	@$(AS_COMPILED) $(BIN)/python -c 'import sys; from gateway.build_info import COMPILED; COMPILED or sys.exit("the gateway is not compiled: it takes a C compiler and Python.h")'
	@$(AS_COMPILED) $(PYTEST) --override-ini pythonpath= $(or $(ARGS),--ignore tests/interop)

test-sources: .venv/.test-ready $(SERVERS) .cache/perf_analyzer/.ready ## Run all tests but test-system from the sources (ARGS= for pytest)
	@$(PYTEST) $(or $(ARGS),--ignore tests/interop)

test-system: .venv/.test-ready ## Run the tests with programs of the system: curl, proxies, load generators (root: installs them)
	@tests/interop/install_programs.sh
	@$(PYTEST) $(or $(ARGS),tests/interop tests/deploy/test_service.py)

wheels: .venv/.wheels-ready ## Build an sdist and wheels into dist, and test each wheel as installed (FULL=1, ARGS= for pytest, VERSIONS=)
	@$(BIN)/python -m tests.deploy.wheels build $(VERSIONS)
	@$(MAKE) --no-print-directory test-wheels

test-wheels: .venv/.test-ready $(if $(FULL),$(SERVERS) .cache/perf_analyzer/.ready) ## Test wheels of dist as installed (WHEELS= for some of them)
	@$(if $(FULL),,TENSORGATE_FUZZ_SECONDS=2 TENSORGATE_TEST_SCALE=0.2) \
	  $(BIN)/python -m tests.deploy.wheels test $(or $(WHEELS),dist/*.whl) -- $(or $(ARGS),$(if $(FULL),--ignore tests/interop,$(TESTS_OF_WHEELS)))

# The seconds of each fuzz test; in `make test` each test has its own time.
SECONDS ?= 120
fuzz: .venv/.test-ready ## Feed generated input to parsers, each test for SECONDS=120 (ARGS= for pytest)
	@TENSORGATE_FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest $(or $(ARGS),tests/fuzz)

# Not for each change: it takes hours, of which the first run spends one on recording what the tests execute.
mutants: .venv/.test-ready ## Measure how strong the tests are: change single places of the gateway (ARGS="--seed 35 --count 300")
	@$(BIN)/python -m tests.support.mutants $(ARGS)

lint: .venv/.test-ready ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/.test-ready ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

soak: .venv/.test-ready ## Keep the gateway under mixed traffic and failures, and see that nothing grows (MINUTES=10)
	@$(BIN)/python -m tests.resilience.soak --minutes $(or $(MINUTES),10)

schema: .venv/.demo-ready ## Write config/schema.json and docs/settings.md anew, after a change of the settings
	@$(BIN)/tensorgate schema > config/schema.json
	@$(BIN)/python -m docs.generate_settings

descriptors: .venv/.test-ready ## Write gateway/protocol/grpc/descriptors.binpb anew, after a change of a .proto file
	@$(BIN)/python -m tests.support.grpc.generate_descriptors

docs: .venv/.test-ready ## Build the documentation as a site in .cache/site; a dead link is an error
	@$(BIN)/python -m docs.generate_settings
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open .cache/site/index.html, or run: $(BIN)/python -m mkdocs serve"

bench: .venv/.bench-ready $(SERVERS) $(COMPILED) ## Measure speed and memory in front of real servers
	@$(AS_COMPILED) $(BIN)/python -m benchmarks $(ARGS)

triton: .venv/.test-ready .cache/triton/.ready ## Start the tests' real Triton by hand (ARGS="--http-port 8000")
	@$(BIN)/python -m tests.integration.triton $(ARGS)

clean: ## Remove all that the targets above have set up, and what a compiler left
	rm -rf .venv .cache build dist *__mypyc*.so
	find gateway -name '*.so' -delete

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tensorgate needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up a virtual environment in .venv ..."
	@$(PYTHON) -m venv .venv

.venv/.demo-ready: pyproject.toml | .venv/bin/python
	@echo "installing the gateway ..."
	@$(PIP) install --editable .
	@touch $@

.venv/.test-ready: pyproject.toml | .venv/bin/python
	@echo "installing the gateway and what its tests need ..."
	@$(PIP) install --editable '.[dev,docs]'
	@touch .venv/.demo-ready $@

.venv/.bench-ready: pyproject.toml | .venv/.test-ready
	@echo "installing what the gateway is measured with ..."
	@$(PIP) install --editable '.[bench]'
	@touch $@

.venv/.wheels-ready: pyproject.toml | .venv/.test-ready
	@echo "installing what repairs wheels ..."
	@$(PIP) install --editable '.[wheels]'
	@touch $@

# Into a folder of its own, which then takes its place: another make may do the same, or run from there.
.cache/compiled/.ready: pyproject.toml hatch_build.py $(shell find gateway build_tools -name '*.py' -o -name '*.[ch]') | .venv/.demo-ready
	@echo "compiling the gateway into .cache/compiled (two minutes; with TENSORGATE_PURE=1, make does without) ..."
	@mkdir -p .cache && built=$$(mktemp -d .cache/compiling.XXXXXX) && trap "rm -rf $$built" EXIT && \
	  TENSORGATE_PURE=0 $(PIP) install --no-deps --target $$built/site . && touch $$built/.ready && \
	  if [ ! -e $@ ] || [ -n "$$(find $^ -newer $@)" ]; then rm -rf .cache/compiled && mv $$built .cache/compiled; fi

.cache/triton/.ready: tests/integration/triton/requirements.txt tests/integration/triton/install.py
	@echo "setting up a Triton server for the tests in .cache/triton (some 75 MB to fetch) ..."
	@$(PYTHON) -m tests.integration.triton.install .cache/triton
	@touch $@

.cache/kserve/.ready .cache/mlserver/.ready: .cache/%/.ready: tests/integration/%/requirements.txt
	@echo "setting up $* for the tests in .cache/$* (some 55 MB to fetch) ..."
	@$(PYTHON) -m tests.integration.environment $*
	@touch $@

# It needs libraries that come with Triton.
.cache/perf_analyzer/.ready: tests/integration/perf_analyzer/requirements.txt tests/integration/perf_analyzer/install.py .cache/triton/.ready
	@echo "setting up NVIDIA's perf_analyzer for the tests in .cache/perf_analyzer (14 MB to fetch) ..."
	@$(PYTHON) -m tests.integration.perf_analyzer.install .cache/perf_analyzer
	@touch $@
