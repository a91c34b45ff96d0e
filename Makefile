# The one entry point. `make` prints what there is.
.DEFAULT_GOAL := help
# Compiled files are kept: hundreds of processes are started, and each would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo test test-all test-spark test-core test-others test-newer test-versions test-sqlalchemy-oldest lint check bench bench-large docs

# Debian's Python is compiled with profile-guided optimization; one that pyenv has compiled takes 1.5 times as long.
ifneq ($(wildcard /usr/bin/python3.11),)
export UV_PYTHON ?= /usr/bin/python3.11
endif
UV := $(shell command -v uv 2>/dev/null || echo python3 -m uv)
RUN := $(UV) run --frozen --no-sync
WORKERS ?= 4

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "make %-22s %s\n", $$1, $$2}'

setup: .venv/installed ## install what is missing (uv, dependencies, servers for the tests); quick when nothing is
	@tests/servers/install.sh
	@docs/mermaid.sh

.venv/installed: pyproject.toml uv.lock Makefile
	@tests/servers/uv.sh
	$(UV) sync --frozen --all-groups --all-extras
	@touch $@

demo: setup ## the whole pipeline: Spark schedules 10 000 reminders in two tiers, the dispatcher is killed, Spark audits
	$(RUN) python -m examples.demo --from examples/reminders/reminders.csv --spark --report demo/report.html

lint: setup ## format, lint, types, layers
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) deptry .
	$(RUN) codespell

check: lint ## the same and the fast tests; no server, under a minute
	$(RUN) pytest -q -n $(WORKERS) tests/unit tests/conformance/test_memory.py

# What the core's coverage is taken of: a tracer doubles what a test takes, and the others add nothing to it.
CORE := tests/unit tests/conformance/test_memory.py tests/conformance/test_custom_store.py tests/conformance/test_sqlite.py \
	tests/integration/test_callers.py tests/integration/test_handler_transactions.py tests/integration/test_send_many.py tests/cli/test_config.py tests/cli/test_doctor.py \
	tests/cli/test_errors.py tests/cli/test_pending.py tests/cli/test_queues.py tests/integration/test_given_up_transactions.py \
	tests/integration/test_handler_outages.py tests/integration/test_queue_limits.py tests/integration/test_event_loops.py \
	tests/cli/test_actions.py tests/cli/test_schedules.py tests/integration/test_dispatch_pauses.py tests/integration/test_failure_index.py tests/cli/test_find.py tests/integration/test_find.py \
	tests/integration/test_sets_in_trouble.py tests/integration/test_requests.py tests/integration/test_sets.py \
	tests/cli/test_send.py tests/integration/test_callers_elsewhere.py tests/integration/test_forks.py tests/integration/test_outbox.py

test: export DELAYLINE_TEST_SAMPLE := $(shell git rev-parse --short HEAD 2>/dev/null || echo 0)
test: setup ## the checks, the tests with a sample of the long suites, the core's coverage, the docs
	@$(MAKE) --no-print-directory -j4 --output-sync=target lint test-spark test-others test-core test-newer

test-all: setup ## the same with every test, also the long ones
	@$(MAKE) --no-print-directory -j4 --output-sync=target lint test-spark test-others test-core test-newer

# Side by side: tests wait more than they work, for servers, a JVM and due times, and mypy uses one processor.
test-spark: setup
	DELAYLINE_REQUIRE_SERVICES=1 $(RUN) pytest -n 0 tests/spark --durations=10

test-core: setup
	DELAYLINE_REQUIRE_SERVICES=1 $(RUN) pytest -n 2 $(CORE) --cov --cov-branch --cov-report=
	$(RUN) coverage report --fail-under=95
	@$(MAKE) --no-print-directory test-sqlalchemy-oldest

test-others: setup
	DELAYLINE_REQUIRE_SERVICES=1 $(RUN) pytest -n $(WORKERS) -m "not spark and not newer_server" $(CORE:%=--ignore=%) --durations=15

# What a newer RabbitMQ is tried with in `make test`, beside the tests that ask for one.
NEWER_SAMPLE := tests/conformance/test_rabbitmq.py $(addprefix tests/integration/test_rabbitmq_,delivery.py infrastructure.py verification.py)
ON_SERVERS = DELAYLINE_REQUIRE_SERVICES=1 DELAYLINE_SERVERS_ROOT="$$tree" $(RUN) pytest -m "server or cluster" -k "not azur"

# Comes after `lint`, when a processor is free: installing other servers, which is done once, takes minutes. Where this machine's
# own are new enough nothing is installed, as every test runs on them; where nothing can be installed, it says why.
test-newer: setup ## what asks for a newer server, and a sample on Debian 13's where this machine's are older
	@tree=$$($(RUN) python -m tests.servers.debian trixie --if-older) && everything=1 || { echo "not tested on newer servers"; tree= everything=0; }; \
	DELAYLINE_REQUIRE_SERVICES=$$everything $(RUN) pytest -q -n 2 -m newer_server tests && \
	{ [ -z "$$tree" ] || $(ON_SERVERS) -q -n 2 $(NEWER_SAMPLE); }

SUITE ?= trixie
test-versions: setup ## every suite of RabbitMQ, PostgreSQL and MariaDB on Debian 13's; with SUITE=sid on those of Debian sid
	tree=$$($(RUN) python -m tests.servers.debian $(SUITE)) && $(ON_SERVERS) -n $(WORKERS) tests/conformance tests/integration tests/cluster

# The stores on the oldest SQLAlchemy that pyproject.toml allows, laid over the environment.
OLDEST_SQLALCHEMY := $(shell sed -n 's/.*"sqlalchemy>=\([0-9.]*\),.*/\1/p' pyproject.toml)
test-sqlalchemy-oldest: setup ## stores on the oldest SQLAlchemy that is supported
	DELAYLINE_REQUIRE_SERVICES=1 $(RUN) --with sqlalchemy==$(OLDEST_SQLALCHEMY) pytest -q -n $(WORKERS) \
		tests/unit/test_sqlalchemy.py \
		tests/conformance/test_sqlite.py tests/conformance/test_postgresql.py -k "sqlalchemy or SqliteStore or PostgresqlStore"

bench: setup ## the figures: ratios to raw loops over the same file or server, into benchmarks/results
	$(RUN) python -m benchmarks

bench-large: setup ## dispatch and scheduling behind ten million pending: 30 GB of disk, a quarter of an hour
	$(RUN) python -m benchmarks pg_large

docs: setup ## build the pages into site/
	$(RUN) mkdocs build --strict
