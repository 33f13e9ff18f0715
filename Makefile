# Each target sets up what it needs. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
DOCS   := .venv-docs
SITE   := .site
# uv needs a fifth of pip's CPU time and shows progress. These options pass it pip's index and folders of wheels.
INDEX   = $(or $(PIP_INDEX_URL),$(shell $(BIN)/pip config get global.index-url 2>/dev/null))
UV      = $(BIN)/uv pip install --python $(BIN)/python --system-certs --constraint constraints.txt \
	$(if $(INDEX),--default-index $(INDEX)) $(addprefix --find-links ,$(PIP_FIND_LINKS))
# The same for commands of uv that other programs run.
UV_ENVIRONMENT = UV_SYSTEM_CERTS=1 UV_FIND_LINKS="$$(echo $(PIP_FIND_LINKS) | tr ' ' ,)" $(if $(INDEX),UV_DEFAULT_INDEX='$(INDEX)')
PORT   ?= 8000
# Tests of one file share models and servers, so they run in one worker. Many tests wait for processes, so there are
# more workers than processors.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)
PYTEST := $(BIN)/pytest -n $(WORKERS) --maxprocesses 6 --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 3

CRD_FILES := $(foreach folder,crds charts/stoker/files,--output $(folder)/inferenceendpoints.stoker.dev.yaml) \
	--reference docs/reference/inferenceendpoint.md

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-all emulator test-gpu lint format generate verify docs docs-links cluster cluster-build cluster-down images e2e e2e-all soak bench bench-quick bench-gpu bench-operator release release-version clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-15s %s\n", $$1, $$2}'

# Creates .venv with the packages $(1), and compiles the CPU kernels during the downloads, since a compiler needs no packages.
# sed removes the list of more than 200 packages from uv's messages; pipefail keeps uv's exit code.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.12, for example"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@echo "downloading 3 GB of packages, mostly PyTorch with CUDA's libraries, and compiling the CPU kernels ..."
	@PYTHONPATH=common:engine $(BIN)/python -m stoker_engine.kernels.cpu.build --levels host --cache & compiling=$$!; \
		$(UV) $(1) 2>&1 | sed -u '/^ + /d'; status=$$?; \
		wait $$compiling || echo "without compiled kernels, torch's operators run instead, several times slower"; exit $$status
endef
EVERYTHING := --editable '.[engine,operator,gateway,demo,dev]'
FOR_DEMO   := --editable '.[engine,operator,demo]' openai

$(READY) $(DEMO_READY): SHELL := /bin/bash
$(READY) $(DEMO_READY): .SHELLFLAGS := -o pipefail -c

setup: $(READY) ## .venv with all extras

$(READY): pyproject.toml constraints.txt
	$(call install,$(EVERYTHING))
	@touch $@ $(DEMO_READY)

$(DEMO_READY): pyproject.toml constraints.txt
	$(call install,$(FOR_DEMO))
	@touch $@

demo: $(if $(wildcard $(READY)),$(READY),$(DEMO_READY)) ## serve the demo manifest on this machine and send requests (PORT=8000; ONCE=1: exit afterwards)
	$(BIN)/python examples/demo.py --port $(PORT) $(if $(ONCE),--once)

check: lint ## lint, and the tests of changed files, in minutes; enough for most commits (BASE=main: changes since that branch)
	@tests=$$($(BIN)/python tests/changed.py $(BASE)) && if [ -z "$$tests" ]; then echo "no tests found for the changed files"; \
		else echo "$(PYTEST) --slow none $$tests" && $(PYTEST) --slow none $$tests; fi

test: setup ## unit and component tests without slow ones (SLOW=drawn: with a fixed sample of their cases; ORDER=SEED: another order)
	$(PYTEST) --slow $(or $(SLOW),none) $(if $(ORDER),--order $(ORDER)) $(if $(RESULTS),--times $(RESULTS).jsonl --junitxml $(RESULTS).xml)

test-all: setup ## all unit and component tests, with every case of the slow ones, and lm_eval's
	$(UV) --editable '.[evals]'
	$(PYTEST)

emulator: ## install a compiler and qemu for the tests of Arm's kernels on other processors (Debian, as root)
	@{ command -v qemu-aarch64-static && command -v aarch64-linux-gnu-g++; } >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 g++-aarch64-linux-gnu qemu-user-static >/dev/null; }

test-gpu: setup ## tests on a machine with a GPU: the kernels, the engine's results, and its waits for the device
	STOKER_ON_CHIP=1 $(BIN)/pytest tests/engine/kernels/triton/interpreted tests/engine/gpu

lint: setup ## ruff, clang-format, mypy --strict, import-linter; finds clocks, sleeps and short limits in tests, and retired names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.h' '*.c' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/mypy conftest.py
	$(BIN)/mypy e2e/conftest.py e2e/kit e2e/cluster e2e/soak e2e/run.py e2e/vllm/cuda_stand_ins.py examples docs/tutorials/tutorial.py docs/generate benchmarks images release charts/stoker/files/*.py
	$(BIN)/python tests/lint_clocks.py
	$(BIN)/python tests/lint_names.py
	$(BIN)/lint-imports

format: setup ## format and fix with ruff and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.h' '*.c' | xargs $(BIN)/clang-format -i

generate: setup ## generate the CRD, its copy in the chart, and the reference pages
	$(BIN)/stoker crd $(CRD_FILES)
	$(BIN)/python docs/generate

verify: setup ## fail if generated files are stale
	$(BIN)/stoker crd --check $(CRD_FILES)
	$(BIN)/python docs/generate --check
	@$(BIN)/python -m release.version --check

# The site needs only Sphinx, so it has a small environment of its own.
$(DOCS)/.ready: BIN := $(DOCS)/bin
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	$(UV) --requirement pyproject.toml --extra docs
	@touch $@

SPHINX = REPOSITORY='$(REPOSITORY)' $(DOCS)/bin/sphinx-build --jobs auto --quiet --fail-on-warning --keep-going

docs: $(DOCS)/.ready ## build the documentation's site, and check its internal links (REPOSITORY=URL: links to files elsewhere in it)
	$(SPHINX) docs $(SITE)
	@echo "open $(SITE)/index.html"

docs-links: $(DOCS)/.ready ## check the documentation's links to other sites (needs open network; not for CI)
	$(SPHINX) --builder linkcheck docs $(SITE)/.links

cluster: ## start a kind cluster for e2e; prints the line that exports KUBECONFIG
	@e2e/cluster/up

cluster-build: ## build the parts of the cluster; long on a fresh machine, cached afterwards
	@e2e/cluster/build

cluster-down: ## remove the cluster and everything it started
	@e2e/cluster/down

images: ## build the container images
	images/build

# The first test that uses the images waits for their build, so its time limit is that of a whole run.
E2E_OPTIONS = --timeout 2400 $(if $(K),-k '$(K)') $(if $(RESULTS),--results $(RESULTS)) $(if $(TIMES),--times $(TIMES))

e2e: setup ## end-to-end tests that each change must pass: API server, kind cluster (K=NAME: a selection; KEEP=1: keep objects)
	e2e/cluster/build
	NODES=$${NODES:-1} $(BIN)/python e2e/run.py -m 'not further' $(E2E_OPTIONS)

e2e-all: setup ## all end-to-end tests: also further scenarios, pods of vLLM, five minutes of soak
	e2e/cluster/build
	LEVELS=all VLLM_IMAGE=$${VLLM_IMAGE:-$$(e2e/vllm/build)} $(BIN)/python e2e/run.py $(E2E_OPTIONS)
	$(MAKE) soak MINUTES=$(or $(MINUTES),5)

soak: setup ## mixed traffic with random faults; fails on leaks and lost requests (MINUTES=30 SEED=0 RESULTS=FILE; not for CI)
	e2e/cluster/build
	MINUTES=$(MINUTES) SEED=$(SEED) $(BIN)/pytest e2e/soak/soak.py -s $(if $(RESULTS),--results $(RESULTS))

BENCH_OPTIONS = $(foreach option,WORKLOADS PEERS MODELS ROUNDS QUIET_S,$(if $($(option)),\
	--$(subst _,-,$(shell echo $(option) | tr A-Z a-z)) '$($(option))'))

bench: setup ## compare Stoker with other engines on this processor (a part: WORKLOADS=W2 PEERS=openvino MODELS=gemma ROUNDS=5)
	PYTHONPATH=benchmarks $(BIN)/python -m cpu $(BENCH_OPTIONS)

bench-quick: setup ## Stoker alone, relative to the machine's limits, in two minutes
	PYTHONPATH=benchmarks $(BIN)/python -m cpu --quick

bench-gpu: setup ## Stoker on this machine's GPU, relative to its limits and goals, in six minutes (a part: PARTS=machine,steps-bf16; LIMIT=350)
	$(BIN)/python benchmarks/gpu.py $(if $(PARTS),--parts '$(PARTS)') $(if $(LIMIT),--seconds '$(LIMIT)')

bench-operator: setup ## measure the operator with 1,000 endpoints on a real API server
	e2e/cluster/build kube helm
	$(BIN)/python benchmarks/operator_scale.py

IMAGES ?= operator gateway engine-cpu
DIST   ?= dist

release: setup ## build wheel, sdist, chart, images, SBOM, checksums and notes into dist; publishes nothing (IMAGES=: no images; DRY_RUN=1: of any commit)
	@$(UV_ENVIRONMENT) $(BIN)/python -m release.build --dist $(DIST) --images '$(IMAGES)' $(if $(DRY_RUN),--dry-run)

release-version: setup ## set the version in all files that state it (VERSION=0.2.0)
	@$(BIN)/python -m release.version '$(VERSION)'

clean: ## remove .venv, the site and the tools' caches
	rm -rf $(VENV) $(DOCS) $(SITE) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
