# make demo   install, then run recipes on real prompts with a real model
# make test   the tests, on the newest transformers and on the oldest that is supported

PYTHON ?= python3
# Without an NVIDIA GPU: a version whose CPU build pip prefers where an index offers one (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL).
# Another torch: make TORCH=torch==2.11.0
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)
OLDEST ?= 5.17.0
# Each worker of the tests takes a core and up to 3 GB.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist worksteal

RUN = .venv/bin/decodekit run
INSTALLED = .venv/.installed
OLDEST_SITE = .venv/transformers-$(OLDEST)
PLUGINS = $(wildcard plugins/*/)

.PHONY: install demo test test-newest test-oldest matrix matrix-oldest matrix-newest mutants soak lint types tables

install: $(INSTALLED)

# The entry points of an editable install are copies of these files, so a change to any of them installs again.
$(INSTALLED): pyproject.toml $(PLUGINS:%=%pyproject.toml)
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install '$(TORCH)' -e '.[dev,metrics]' $(PLUGINS:%=-e %)
	touch $@

demo: install
	$(RUN) examples/recipes/greedy.yaml "What is the capital of France? Answer in one sentence."
	$(RUN) examples/recipes/sample.yaml "Write a short poem about the sea."
	$(RUN) examples/recipes/dola.yaml "Why is the sky blue? Answer in one sentence."

test: test-newest test-oldest

# The demo model is fetched before workers could do so side by side.
test-newest: install
	.venv/bin/python -c 'from decodekit.integrations.models import load_model; load_model()'
	.venv/bin/python -m pytest $(PARALLEL)

# A second transformers in front of the newest one: what depends on its version runs again. Its huggingface_hub needs httpx,
# which the newest no longer brings.
test-oldest: $(OLDEST_SITE)
	PYTHONPATH=$(OLDEST_SITE) .venv/bin/python -m pytest $(PARALLEL) -m "integration and not slow"

$(OLDEST_SITE): $(INSTALLED)
	rm -rf $@
	.venv/bin/python -m pip install --no-deps --target $@ transformers==$(OLDEST) 'huggingface_hub<2' httpx httpcore
	touch $@

# The corners: the oldest and the newest Python and pins that are supported, each in an environment of its own.
# Elsewhere: make matrix OLDEST_PYTHON=/path/to/python3.11 NEWEST_PYTHON=/path/to/python3.13
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.13
# The interpreter of this torch's triton takes sizes from arrays in a way that NumPy 2.4 refuses.
OLDEST_PINS ?= torch==2.11.0 transformers==$(OLDEST) 'huggingface_hub<2' outlines==1.3.0 'numpy<2.4'

matrix: matrix-oldest matrix-newest

matrix-oldest: .venv/matrix/oldest/.installed
	.venv/matrix/oldest/bin/python -m pytest $(PARALLEL)

matrix-newest: .venv/matrix/newest/.installed
	.venv/matrix/newest/bin/python -m pytest $(PARALLEL)

.venv/matrix/oldest/.installed: pyproject.toml
	$(OLDEST_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(OLDEST_PINS) -e '.[dev,metrics]' $(PLUGINS:%=-e %)
	touch $@

.venv/matrix/newest/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --upgrade '$(TORCH)' transformers -e '.[dev,metrics]' $(PLUGINS:%=-e %)
	touch $@

# What tests notice of seeded faults, and what is left of half an hour of requests with everything that goes wrong.
MINUTES ?= 30

mutants: install
	.venv/bin/python -m decodekit.testing.mutants

soak: install
	.venv/bin/python -m decodekit.testing.soak --minutes $(MINUTES)

lint: install
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports

types: install
	.venv/bin/mypy

# The tables of plugins, from the registry; a test compares them.
tables: install
	.venv/bin/python -m decodekit.cli.tables README.md examples/plugins.md
