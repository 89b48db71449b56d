# make demo | make test do all set-up themselves: Python >= 3.12, pip and network to the package registry are enough.
PYTHON ?= python3
BIN := .venv/bin
LOCK := requirements.lock
PROGRAMS := $(CURDIR)/build/test-programs   # programs that tests have compiled: a later run of the suite takes half the time
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder   # a file's runs and programs are made once

.PHONY: demo test test-loaded test-models test-peers test-oldest test-nightly lint format docs tables gpu-test ptxas lock clean

demo: .venv/.runs
	@$(BIN)/lorafusion demo

test: .venv/.ready
	@LORAFUSION_TEST_PROGRAMS=$${LORAFUSION_TEST_PROGRAMS:-$(PROGRAMS)} $(BIN)/python -m pytest $(PARALLEL)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation, into build/site; any warning is an error.
docs: .venv/.ready
	@cd docs && PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=. NO_MKDOCS_2_WARNING=1 mkdocs build --quiet
	@echo "docs: build/site/index.html"

# Every published table and plot, from the raw rows in benchmarks/results.
tables: .venv/.ready
	@$(BIN)/python -m benchmarks.tables

# What plans, waits or reads a clock, beside two processes that want every core: results may not depend on load. The
# tests get a third of a core; test_one_plan.py of the suite makes a load of its own.
LOADED := $(addprefix tests/scheduling/test_, planner.py one_plan.py balance_work.py issue_order.py several_sizes.py) \
  tests/report/test_meter.py tests/pipeline/test_spans.py tests/pipeline/test_spans_pauses.py \
  tests/training/test_prefetch.py tests/serve/test_fences.py
test-loaded: .venv/.ready
	@(while :; do :; done) & one=$$!; (while :; do :; done) & two=$$!; trap "kill $$one $$two" EXIT INT TERM; \
	nice -n 3 $(BIN)/python -m pytest $(LOADED)

# Published Flax models and qwix, in an environment of their own: they need the dependency group `models`.
test-models: .venv-models/.ready
	@.venv-models/bin/python -m pytest tests/modules/test_published_models.py --no-skips -m "not gpu"

# Training, folders and templates against torch, transformers, PEFT and TRL, in an environment of their own.
test-peers: .venv/.ready .venv-peers/.ready .venv-cookbook/.ready
	@LORAFUSION_PEERS=$(CURDIR)/.venv-peers/bin/python LORAFUSION_COOKBOOK=$(CURDIR)/.venv-cookbook/bin/python \
		$(BIN)/python -m pytest tests/peers -m "not gpu"

# The suite on the oldest version of every direct dependency, in an environment of its own.
test-oldest: .venv-oldest/.ready
	@.venv-oldest/bin/python -m pytest $(PARALLEL)

# Every case, and 10 000 new ones of every property: takes hours.
test-nightly: .venv/.ready
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --hypothesis-profile nightly

# Needs an NVIDIA GPU and a CUDA build of jax in the active environment.
gpu-test:
	$(PYTHON) -m pytest tests -m gpu

# Needs no GPU, but jax's CUDA plugin and ptxas (nvidia-cuda-nvcc) in the active environment: without them it says so.
ptxas:
	$(PYTHON) -m benchmarks.ptxas_report

# The newest version of everything that pyproject.toml allows, with hashes; what make demo waits for stands first.
lock: .venv/.ready
	@mkdir -p build
	$(BIN)/uv pip compile -q --upgrade --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --group dev pyproject.toml -o $(LOCK)
	$(BIN)/uv pip compile -q --universal --no-emit-index-url --no-annotate --no-header --constraint $(LOCK) pyproject.toml -o build/run.lock
	$(PYTHON) .ci/setup.py --join build/run.lock

.venv/.runs: $(LOCK) pyproject.toml .ci/setup.py
	@$(PYTHON) .ci/setup.py --venv .venv --only-run

.venv/.ready: $(LOCK) pyproject.toml .ci/setup.py
	@$(PYTHON) .ci/setup.py --venv .venv

.venv-oldest/.ready: pyproject.toml .ci/setup.py
	@$(PYTHON) .ci/setup.py --venv .venv-oldest --oldest

.venv-models/.ready: $(LOCK) pyproject.toml .ci/setup.py
	@$(PYTHON) .ci/setup.py --venv .venv-models --group models

.venv-peers/.ready: tests/peers/requirements.txt tests/peers/unpackers.txt
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check -r $<
	@for version in 0.30.4 0.34.0 0.36.0; do \
		.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
			--target .venv-peers/tinker-$$version tinker==$$version || exit 1; \
	done
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv-peers/unpackers -r tests/peers/unpackers.txt
	@touch $@

.venv-cookbook/.ready: tests/peers/cookbook.txt
	@$(PYTHON) -m venv .venv-cookbook
	@.venv-cookbook/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf .venv .venv-cookbook .venv-models .venv-oldest .venv-peers dist build
