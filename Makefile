# make demo    serve the embedded model, ask it three things, stop        (the first time: installs, some minutes)
# make serve   serve it on port 1919; ARGS="model=... tp=2" adds options
# make test    lint, types and tests                       make lint    the first two alone
# make docs    the documentation, into site/               make bench   the offline benchmark
# make reference (docs/reference/ and the labs' skeletons), make format, make clean
#
# PYTHON=python3.12 picks the interpreter. On Linux, the default torch is gigabytes of CUDA: README.md says how to get
# the CPU build (PIP_ARGS="--index-url ...").

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.minisgl-base
TOOLS := $(VENV)/.minisgl-tools
TYPES := build/types
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo serve test lint docs bench reference format clean
.DELETE_ON_ERROR:

demo: $(BASE)
	$(BIN)/python -m minisgl.demo

serve: $(BASE)
	$(BIN)/python -m minisgl $(ARGS)

bench: $(TOOLS)
	$(BIN)/python -m minisgl.bench offline $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(TOOLS) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(TOOLS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html."

reference: $(BASE)
	$(BIN)/python -m minisgl.options.reference docs/reference
	$(BIN)/python -m minisgl.course.lab.generate

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# plugins/ and conf/ are installed as minisgl.plugins and minisgl.conf. A type checker does not follow that mapping, so
# it gets a tree in which they stand where they are imported from.
.PHONY: types
types:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/minisgl
	@ln -s $(CURDIR)/minisgl/* $(TYPES)/minisgl/
	@ln -s $(CURDIR)/plugins $(CURDIR)/conf $(TYPES)/minisgl/

# A stamp says that what pyproject.toml and constraints.txt ask for is installed.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'minisgl needs Python 3.11 or newer: make PYTHON=python3.12 ...')"
	@echo "Installing into $(VENV): some minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_ARGS) torch
	$(PIP) -e '.[lab]'
	@touch $@

$(TOOLS): $(BASE)
	$(PIP) -e '.[test,lint,docs]'
	@touch $@
