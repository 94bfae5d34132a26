# On a fresh machine with Python 3.11+ and make:
#   make demo    the main job: predict, train, measure, compare
#   make test    the tests
#   make test-fast   those that start no process and compile nothing: under a minute
#   make test-libraries   tests of scripts that use TRL, Lightning and others, and of the page in a browser,
#                         in an environment of their own
#   make test-oldest      the tests with the oldest versions that pyproject.toml allows, likewise
#   make test-versions    those that depend most on the versions of Python, torch and transformers, such as with
#                         VENV=.venv-3.13 PYTHON=python3.13
#   make docs    the documentation site, in build/site
#   make check   all tests, ruff, pyright, import-linter, the site (what CI runs)
# The output that README and docs show is refreshed by: make outputs
# Tables and figures made from records, in README, docs and evidence, by: make evidence
# The stored outputs of examples/notebooks, by: make notebooks
# PYTHON=python3.12 picks the interpreter; EXTRAS=dev,ray picks the extras; PIP_ARGS='...' is handed to pip.
# Without a GPU, torch's CPU build saves several GB of CUDA libraries:
#   make setup PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= python3
VENV ?= .venv
LIBRARIES_VENV ?= .venv-libraries
OLDEST_VENV ?= .venv-oldest
EXTRAS ?= dev
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal --durations=50

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
LIBRARIES := $(LIBRARIES_VENV)/bin
LIBRARIES_STAMP := $(LIBRARIES_VENV)/.installed
OLDEST := $(OLDEST_VENV)/bin
OLDEST_STAMP := $(OLDEST_VENV)/.installed
REQUIREMENTS := requirements/constraints.txt requirements/libraries.txt requirements/libraries-no-deps.txt

.PHONY: demo outputs evidence docs notebooks test test-fast test-versions setup-libraries test-libraries chromium test-oldest test-oldest-cli check lint types floors setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainfit needs Python 3.11 or later; name one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c requirements/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" demo/run

outputs: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m evidence.scripts.fill_outputs

evidence: setup
	$(BIN)/python -m evidence.scripts.fill_tables

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) -c requirements/constraints.txt -e '.[docs]'
	@touch $@

# A link that leads nowhere, a page in no list, a heading out of order: each is an error.
docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -W --keep-going -q -j auto -c docs . build/site

notebooks: setup-libraries
	$(LIBRARIES)/python -m evidence.scripts.fill_notebooks

# Tests that need a GPU run in a second session: in the first, processes see none.
test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	@if test -e /dev/nvidiactl; then $(BIN)/python -m pytest -m gpu -n 0 --durations=15; fi

# Rooms that a test enters within its own process, without torch's compiler: under a minute on two cores.
FAST ?= tests/spec tests/catalog tests/ledger tests/report tests/test_step.py tests/test_records.py \
  tests/test_record_digests.py
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --fast $(FAST)

# docs/internals/versions.md says with which versions they pass.
VERSIONS ?= tests/models tests/virtual/test_torch_internals.py tests/virtual/test_golden.py \
  tests/virtual/test_model_families_by_version.py tests/prediction/test_predict.py tests/prediction/test_versions.py \
  tests/cli/test_cli.py tests/cli/test_cli_verbs.py tests/test_step.py
test-versions: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not slow' $(VERSIONS)

setup-libraries: $(LIBRARIES_STAMP)

$(LIBRARIES_STAMP): pyproject.toml $(REQUIREMENTS)
	test -x $(LIBRARIES)/python || $(PYTHON) -m venv $(LIBRARIES_VENV)
	$(LIBRARIES)/python -m pip install $(PIP_ARGS) -c requirements/constraints.txt -r requirements/libraries.txt -e '.[dev]'
	$(LIBRARIES)/python -m pip install $(PIP_ARGS) --no-deps -r requirements/libraries-no-deps.txt
	@touch $@

# The browser of the page's tests; Debian's package where there is none.
chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
	  || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; }

test-libraries: setup-libraries chromium
	$(LIBRARIES)/python -m pytest $(PYTEST_ARGS) tests/libraries

$(OLDEST_STAMP): pyproject.toml requirements/oldest.txt
	test -x $(OLDEST)/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST)/python -m pip install $(PIP_ARGS) -c requirements/oldest.txt -e '.[dev]'
	@touch $@

test-oldest: $(OLDEST_STAMP)
	$(OLDEST)/python -m pytest $(PYTEST_ARGS)

# The command line with the oldest versions of what it is made of, beside the torch that is installed.
test-oldest-cli: setup
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --upgrade --target build/oldest-cli \
	  $$(grep -E '^(pydantic|pydantic-core|typer|rich|jinja2|ruamel.yaml)==' requirements/oldest.txt)
	PYTHONPATH=build/oldest-cli $(BIN)/python -m pytest $(PYTEST_ARGS) tests/cli/test_cli.py tests/spec tests/test_records.py

check:
	.ci/run

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

floors: setup
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(LIBRARIES_VENV) $(OLDEST_VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache
