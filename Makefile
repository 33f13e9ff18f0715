# Every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# uv needs a fifth of pip's CPU time and shows progress. It gets pip's configuration: the index, and folders of wheels.
INDEX   = $(or $(PIP_INDEX_URL),$(shell $(BIN)/pip config get global.index-url 2>/dev/null))
UV      = $(BIN)/uv pip install --python $(BIN)/python --system-certs --constraint constraints.txt \
	$(if $(INDEX),--default-index $(INDEX)) $(addprefix --find-links ,$(PIP_FIND_LINKS))
PORT   ?= 8000
# A file's tests share models and servers, so they stay together. Many wait for processes, so there are more workers than processors.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
PYTEST := $(BIN)/pytest -n $(WORKERS) --maxprocesses 6 --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 3

CRD_FILES := $(foreach folder,crds charts/stoker/files,--output $(folder)/inferenceendpoints.stoker.dev.yaml) \
	--reference docs/reference/inferenceendpoint.md

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-all emulator test-gpu lint format generate verify cluster cluster-build cluster-down images e2e e2e-all soak bench bench-quick bench-operator clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(READY) ## .venv with all extras

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.12, for example"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	@echo "installing the packages, about 7 GB with CUDA's libraries ..."
	$(UV) --editable '.[engine,operator,gateway,demo,dev]'
	@echo "compiling the CPU kernels, about a minute ..."
	@$(BIN)/python -c 'from stoker_engine.kernels.cpu.library import library; library()'
	@touch $@

demo: setup ## serve the demo manifest on this machine and talk to it (ONCE=1: end afterwards)
	$(BIN)/python examples/demo.py --port $(PORT) $(if $(ONCE),--once)

check: lint ## what most commits need, in minutes: lint, and the tests of what changed (BASE=main: since that branch)
	@tests=$$($(BIN)/python tests/changed.py $(BASE)) && if [ -z "$$tests" ]; then echo "no tests are named after what changed"; \
		else echo "$(PYTEST) --slow none $$tests" && $(PYTEST) --slow none $$tests; fi

test: setup ## unit and component tests; of the slow ones none, or a fixed part of their cases (SLOW=drawn); ORDER=1: another order
	$(PYTEST) --slow $(or $(SLOW),none) $(if $(ORDER),--order $(ORDER)) $(if $(RESULTS),--times $(RESULTS).jsonl --junitxml $(RESULTS).xml)

test-all: setup ## all of them, every case of the slow ones too, and lm_eval's
	$(UV) --editable '.[evals]'
	$(PYTEST)

emulator: ## what the tests of Arm's kernels need on other processors: a compiler and qemu (Debian, as root)
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-g++; } >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 g++-aarch64-linux-gnu qemu-user-static >/dev/null; }

test-gpu: setup ## on a machine with a GPU: kernels on the chip, the engine's exactness, where it waits
	STOKER_ON_CHIP=1 $(BIN)/pytest tests/engine/kernels/triton/interpreted tests/engine/gpu

lint: setup ## ruff, mypy --strict, import-linter, no clocks, sleeps and short limits in tests, no retired names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy conftest.py
	$(BIN)/mypy e2e/conftest.py e2e/kit e2e/cluster e2e/soak e2e/run.py e2e/vllm/cuda_stand_ins.py examples/demo.py docs/tutorials/tutorial.py benchmarks images charts/stoker/files/*.py
	$(BIN)/python tests/lint_clocks.py
	$(BIN)/python tests/lint_names.py
	$(BIN)/lint-imports

format: setup ## let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup ## write what is generated: the CRD, also into the chart, and its reference page
	$(BIN)/stoker crd $(CRD_FILES)

verify: setup ## fail when generated files are stale
	$(BIN)/stoker crd --check $(CRD_FILES)

cluster: ## a kind cluster for e2e; prints the KUBECONFIG to export
	@e2e/cluster/up

cluster-build: ## what the cluster is built from; long on a fresh machine, cached afterwards
	@e2e/cluster/build

cluster-down: ## remove the cluster and everything it started
	@e2e/cluster/down

images: ## build the container images
	images/build

# The first test to ask for the images waits for their build, so the limit is a whole run's, not a test's.
E2E_OPTIONS = --timeout 2400 $(if $(K),-k '$(K)') $(if $(RESULTS),--results $(RESULTS)) $(if $(TIMES),--times $(TIMES))

e2e: setup ## what each change must pass on a real API server and a kind cluster (K=rolling: those so called; KEEP=1: keep all)
	e2e/cluster/build
	NODES=$${NODES:-1} $(BIN)/python e2e/run.py -m 'not further' $(E2E_OPTIONS)

e2e-all: setup ## all of it: the further scenarios, vLLM's own pods, five minutes of soak
	e2e/cluster/build
	LEVELS=all VLLM_IMAGE=$${VLLM_IMAGE:-$$(e2e/vllm/build)} $(BIN)/python e2e/run.py $(E2E_OPTIONS)
	$(MAKE) soak MINUTES=$(or $(MINUTES),5)

soak: setup ## mixed traffic with random faults; fails on leaks and lost requests (MINUTES=30 SEED=0 RESULTS=FILE; not for CI)
	e2e/cluster/build
	MINUTES=$(MINUTES) SEED=$(SEED) $(BIN)/pytest e2e/soak/soak.py -s $(if $(RESULTS),--results $(RESULTS))

BENCH_OPTIONS = $(foreach option,WORKLOADS PEERS MODELS ROUNDS QUIET_S,$(if $($(option)),\
	--$(subst _,-,$(shell echo $(option) | tr A-Z a-z)) '$($(option))'))

bench: setup ## Stoker beside other engines on this processor (WORKLOADS=W2 PEERS=openvino MODELS=gemma ROUNDS=5: part of it)
	PYTHONPATH=benchmarks $(BIN)/python -m cpu $(BENCH_OPTIONS)

bench-quick: setup ## Stoker alone in two minutes, against what the machine can do at most
	PYTHONPATH=benchmarks $(BIN)/python -m cpu --quick

bench-operator: setup ## the operator with 1,000 endpoints on a real API server
	e2e/cluster/build kube helm
	$(BIN)/python benchmarks/operator_scale.py

clean: ## remove .venv and caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
