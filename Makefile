# The two commands a stranger needs are `make demo` and `make test`; each builds its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow bench lint clean

demo: $(STAMP)
	$(BIN)/gefen demo --out demo-out

test: $(STAMP)
	$(BIN)/python -m pytest

# Also trains under other packages' trainers, which take some 20 s to install.
test-slow: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,integrations,quality]'
	$(BIN)/python -m pytest -m slow

# Optimizers side by side; with `make bench-peers` other packages too, from an environment of their own, which `bench`
# then uses as well. Options: `make bench ARGS='--scale small --dtype fp32'`, all of them: ARGS=--help.
PEERS := .venv-peers

bench: $(STAMP)
	$(if $(wildcard $(PEERS)/.installed),$(PEERS),$(VENV))/bin/python -m tests.benchmarks $(ARGS)

.PHONY: bench-peers
bench-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m tests.benchmarks $(ARGS)

# What they learn on three small tasks: hours, kept run by run. All options: `make quality ARGS=--help`.
.PHONY: quality
quality: $(PEERS)/.installed
	$(PEERS)/bin/python -m tests.benchmarks.quality $(ARGS)

# gefen and gefen-x both bring a package called `gefen`: one of them gets a folder of its own.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --editable '.[quality]' \
		gefen-x==0.5.0 torchao==0.18.0 bitsandbytes==0.50.2
	$(PEERS)/bin/pip install --quiet --no-deps --target $(PEERS)/gefen-original gefen==1.2.3
	touch $@

# The site, from the pages and notebooks in `notebooks/` and the docstrings: open site/index.html.
.PHONY: docs
docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going --quiet notebooks site

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-peers demo-out bench-out site jupyter_execute

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $@
