# Needs Python >= 3.11, make and a network; everything else goes to .venv.

VENV        ?= .venv
HEED_DATA   ?= ./data-demo
# Index that is asked for torch's CPU build first; `make install TORCH_INDEX=` takes pip's own (CUDA on Linux).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export HEED_DATA

PY  := $(VENV)/bin/python
# Compiling all of torch doubles the wait, so bytecode is left to imports; the heavy ones are done at the end.
# Twice quiet: errors are printed, and no warning of an index or of a build that went well.
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --no-compile
# Written last, so that an installation that was cut short is resumed: what running needs, and what tests need on top.
INSTALLED := $(VENV)/.installed
STAMP := $(VENV)/.setup
RECTOOLS := $(VENV)-rectools
AUDIT := $(VENV)-audit
CLIENTS := $(VENV)-clients

.DEFAULT_GOAL := help
.PHONY: help install setup demo test verify fuzz known faults distributed reference browser prometheus postgres clients cluster-drill weight lint audit bench bench-page bench-peers lock clean

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## create or refresh .venv with what running needs

setup: $(STAMP) ## the same, with what tests and checks need

demo: $(INSTALLED) ## fetch a public data set, serve it, and train beside
	@$(VENV)/bin/heed demo

PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest
SHARED = -n auto --dist loadfile --no-loadscope-reorder
# Schemathesis makes a test of each operation, all of one id, of which processes that share tests would run one: these
# run beside the others, and report when all of them are done.
ALONE = tests/service/http/test_openapi.py tests/service/http/test_openapi_engine.py

# Many tests start interpreters, each of which would compile its imports again if none kept the bytecode.
test verify: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) tests/__pycache__ ## run the tests that need Python only, in some three minutes (ARGS="-k name")
	$(PYTEST) $(SHARED) -m "not verify" $(ALONE:%=--ignore %) $(ARGS)

verify: $(STAMP) browser prometheus postgres clients tests/__pycache__ ## run all tests: services, browsers, databases (ARGS="-k name")
	@echo "verify: starts services, PostgreSQL, Prometheus, Chromium and npm's programs, all on this machine"
	@log=$$(mktemp); \
	(for file in $(ALONE); do $(PYTEST) $$file $(ARGS) || [ $$? = 5 ] || failed=1; done >$$log 2>&1; \
	cat $$log; rm -f $$log; exit $${failed:-0}) & \
	$(PYTEST) $(SHARED) $(ALONE:%=--ignore %) $(ARGS) || status=1; \
	wait $$! || status=1; exit $${status:-0}

# Processes that start together would each compile all tests, so the first time one does it before them.
tests/__pycache__: | $(STAMP)
	@PYTHONDONTWRITEBYTECODE= $(PYTEST) --collect-only -qq >/dev/null || true

fuzz: $(STAMP) ## draw 500 requests of each operation, new ones each time (EXAMPLES=500, ARGS="-k search")
	HEED_SCHEMATHESIS_EXAMPLES=$(or $(EXAMPLES),500) $(PYTEST) tests/service/http/test_openapi_engine.py $(ARGS)

known: $(STAMP) ## search PyVideo for known items and record where they are found (PYVIDEO=DIR)
	@test -e "$(PYVIDEO)/videos.jsonl.gz" || { echo "name a folder with PyVideo's videos.jsonl.gz: make known PYVIDEO=DIR" >&2; exit 1; }
	$(VENV)/bin/heed evaluate-search "$(PYVIDEO)" --judgments tests/known_items/pyvideo.csv --json tests/known_items/pyvideo.json
	PYVIDEO="$(abspath $(PYVIDEO))" $(PY) -m pytest tests/known_items

reference: $(STAMP) ## write the pages of docs/reference from the code
	OMP_NUM_THREADS=1 $(PY) -m tests.support.reference_pages

faults: $(STAMP) ## inject faults into processes, disks and files; as root, with strace and faketime (ARGS="kill power --seed 1")
	OMP_NUM_THREADS=1 $(PY) -m tests.faults $(ARGS)

cluster-drill: $(STAMP) ## kill each container of the cluster of docker-compose.yml under load (ARGS="postgres-1 --hold 60")
	docker compose up --detach --build --wait balancer
	$(PY) -m tests.deploy.cluster_drill $(ARGS)

OF_STORES := tests/acceptance/test_state_machine.py $(addprefix tests/service/,stores/test_postgres.py stores/test_bulk_access.py stores/shared maintenance/test_copying.py)
distributed: $(STAMP) ## test stores on a Citus cluster of this machine, whose workers are killed (HEED_TEST_CITUS=postgresql://…)
	@[ -n "$$HEED_TEST_CITUS" ] || { $(PY) -c 'from tests.support.citus_databases import MISSING; print(MISSING)'; exit 1; }
	$(PYTEST) tests/distributed $(OF_STORES) $(ARGS)

# The headless shell takes half the time of Chromium for a page, but not every distribution has it.
browser: $(STAMP) ## Chromium's headless shell, which the tests of the page drive, unless there is one or a Chromium
	@for each in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do \
	  if command -v $$each >/dev/null; then exit 0; fi; done; \
	echo "verify: installing Chromium"; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq; export DEBIAN_FRONTEND=noninteractive; install="apt-get install -y -qq --no-install-recommends"; \
	  $$install chromium-headless-shell >/dev/null 2>&1 || $$install chromium >/dev/null; \
	else $(PY) -m playwright install --only-shell chromium; fi

# Unpacked and not installed, for the package would start a daemon on port 9090. After the browser, since apt-get runs
# alone.
prometheus: $(STAMP) browser ## Prometheus and promtool, which the tests of alerts and of the dashboard run, unless there are
	@export PATH="$$PATH:$(abspath $(VENV))/bin"; \
	if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi; \
	command -v apt-get >/dev/null || { echo "verify: put prometheus and promtool on PATH (https://prometheus.io/download)" >&2; exit 1; }; \
	echo "verify: fetching Prometheus"; set -e; \
	[ "$$(id -u)" != 0 ] || apt-get update -qq; \
	folder=$$(mktemp -d); chmod 755 "$$folder"; (cd "$$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg -x prometheus_*.deb .); \
	cp "$$folder/usr/bin/prometheus" "$$folder/usr/bin/promtool" $(VENV)/bin/; rm -rf "$$folder"

# Debian's package makes a cluster and starts it, unless it is told not to before it is installed. After Prometheus,
# since apt-get runs alone.
CLUSTERS := /etc/postgresql-common/createcluster.conf
postgres: $(STAMP) prometheus ## PostgreSQL's server, which the tests of stores start, unless there is one (or HEED_TEST_POSTGRES=URL)
	@$(PY) -c 'from tests.support.postgres_programs import program; program("initdb"); program("postgres")' 2>/dev/null && exit 0; \
	[ -z "$$HEED_TEST_POSTGRES" ] || exit 0; \
	command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { \
	  echo "verify: put PostgreSQL's initdb and postgres on PATH (Debian: apt-get install postgresql)," \
	    "or name a server that runs: make verify HEED_TEST_POSTGRES=postgresql://user@host/database" >&2; exit 1; }; \
	echo "verify: installing PostgreSQL"; export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql-common >/dev/null || exit 1; \
	echo "create_main_cluster = false # make postgres" >>$(CLUSTERS); \
	apt-get install -y -qq --no-install-recommends postgresql >/dev/null; status=$$?; \
	sed -i '/# make postgres$$/d' $(CLUSTERS); exit $$status

clients: $(CLIENTS)/.setup ## generators of typed clients, which the tests run (needs node and npm)

weight: $(STAMP) ## lines of each room and its budget
	$(PY) -m pytest tests/test_weight.py -q -s -k has_a_budget

lint: $(STAMP) ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

audit: $(STAMP) ## compare the locked dependencies with a database of advisories, where one is reached
	@test -x $(AUDIT)/bin/pip-audit || { $(PY) -m venv --without-pip $(AUDIT) && \
	  $(subst -m pip,-m pip --python $(AUDIT)/bin/python,$(PIP)) 'pip-audit==2.10.1'; }
	@$(PY) requirements/audit.py $(AUDIT)/bin/pip-audit requirements/runtime.txt

bench: $(STAMP) ## measure beside references, see tests/benchmarks/README.md (of a running service: heed loadtest)
	$(PY) -m tests.benchmarks $(ARGS)

bench-page: $(STAMP) browser ## time the page of a data directory, from the last key to the first results (ARGS="DIR")
	$(PY) -m tests.benchmarks.page $(or $(ARGS),$(HEED_DATA))

bench-peers: $(STAMP) $(RECTOOLS)/.setup ## measure beside RecTools' SASRec and implicit's ALS (ARGS="recommend", ARGS="training ml-100k")
	$(PY) -m tests.benchmarks.peers $(or $(ARGS),--help) $(if $(ARGS),--python $(RECTOOLS)/bin/python)

lock: ## resolve pyproject.toml again into requirements/
	$(find_python); "$$python" -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet 'pip-tools>=7.4'
	$(compile) -o requirements/runtime.txt pyproject.toml
	$(compile) -c requirements/runtime.txt --extra dev --extra otel --extra parquet --extra plots --extra transformers -o requirements/dev.txt pyproject.toml
	rm -rf $(VENV)-lock

clean: ## remove .venv, caches and builds; data stays
	rm -rf $(VENV) $(RECTOOLS) $(AUDIT) $(CLIENTS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# runtime.txt is whole but for torch, which some of it asks for and which comes next: so no dependencies.
$(INSTALLED): pyproject.toml requirements/runtime.txt requirements/torch.txt
	@$(find_python); \
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "install: creating $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); }
	@echo "install: into $(VENV) (the first time downloads about 290 MB; about half a minute from a cache)"
	@$(filter-out --no-compile,$(PIP)) 'pip==26.3'  # the one of Python 3.11 takes twice as long
	@$(PIP) --no-deps --require-hashes -r requirements/runtime.txt
	@$(PIP) $$($(PY) requirements/torch_index.py '$(TORCH_INDEX)') -r requirements/torch.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import faiss, fastapi, torch._dynamo'
	@touch $@

# dev.txt repeats runtime.txt, which is installed already.
$(STAMP): $(INSTALLED) requirements/dev.txt
	@echo "setup: adding what tests and checks need (the first time downloads about 230 MB)"
	@$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	@PYTHONDONTWRITEBYTECODE= $(PY) -c 'import pytest'
	@touch $@

# RecTools wants other versions than Heed's, so it has an environment of its own.
$(RECTOOLS)/.setup: requirements/rectools.txt requirements/torch.txt
	@$(find_python); "$$python" -m venv --clear $(RECTOOLS)
	@echo "bench-peers: installing RecTools and implicit into $(RECTOOLS)"
	@set -e; pip="$(RECTOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"; \
	$$pip $$($(PY) requirements/torch_index.py '$(TORCH_INDEX)') -r requirements/torch.txt; \
	$$pip -r requirements/rectools.txt -c requirements/torch.txt
	@touch $@

# openapi-python-client wants another typer than Heed's.
$(CLIENTS)/.setup: Makefile | $(STAMP)
	@command -v npm >/dev/null || { echo "verify: put node and npm on PATH (https://nodejs.org)" >&2; exit 1; }
	@echo "verify: fetching generators of clients"
	@$(PY) -m venv --clear --without-pip $(CLIENTS)
	@$(subst -m pip,-m pip --python $(CLIENTS)/bin/python,$(PIP)) 'openapi-python-client==0.29.1'
	@npm install --loglevel error --no-fund --no-audit --no-save --ignore-scripts --prefix $(CLIENTS) \
	  openapi-typescript@7.13.0 openapi-fetch@0.17.0 typescript@5.9.3
	@touch $@

# Sets $python to $(PYTHON), or to the first Python found that will do.
define find_python
set -e; python=; for each in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
  if "$$each" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    python=$$each; break; fi; done; \
if [ -z "$$python" ]; then \
  echo "Heed needs Python 3.11 or later with the venv module ($(or $(PYTHON),python3) will not do)." \
    "Install one, or name it: make install PYTHON=/path/to/python3.11" >&2; exit 1; fi
endef

# torch stays out of the locks (pip-compile warns of it, rightly); its CPU build keeps CUDA's packages out of the resolution too.
compile = CUSTOM_COMPILE_COMMAND='make lock' $(VENV)-lock/bin/pip-compile --quiet --upgrade --generate-hashes \
  --strip-extras --no-annotate --no-allow-unsafe --unsafe-package torch -c requirements/torch.txt \
  --no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
  --extra-index-url '$(TORCH_INDEX)'
