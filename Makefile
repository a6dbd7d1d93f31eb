# Everything is set up on the first use: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
BUILD  := $(VENV)/build
DOCS   := $(VENV)/docs
LINKS  := $(VENV)/links
SBOM   := $(VENV)/sbom
NEWEST := $(VENV)/newest
PIP    := -m pip install --quiet --disable-pip-version-check --require-hashes
DOCKER ?= docker
IMAGE  ?= kvbus:local
ARCHITECTURE := $(if $(filter aarch64 arm64,$(shell uname -m)),arm64,amd64)
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

# of a commit the same files each time; outside a clone the date that hatchling takes
DATED := SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 1580601600) PYTHONHASHSEED=0
# what else a release builds; PARTS= where there is no docker
PARTS ?= image-layout

# tests start hundreds of processes, and each of pytest's workers would rewrite every test module anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup tools golden demo site links test test-all newest newest-others coverage path bench bench-worth chaos vopr others interop hours real-engine soak explore fuzz cost flood lint format charts platforms cluster dockerfile wheel \
	client-wheel image image-layout release release-check release-rehearsal assemble version lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvbus needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# next to requirements.lock: the pins they share are equal
$(TOOLS): $(STAMP) .ci/tools.lock
	@$(BIN)/python $(PIP) --only-binary :all: -r .ci/tools.lock
	@touch $@

$(BUILD)/.installed: requirements-build.lock
	@$(PYTHON) -m venv $(BUILD)
	@$(BUILD)/bin/python $(PIP) --only-binary :all: -r requirements-build.lock
	@touch $@

setup: $(STAMP)

$(SBOM)/.installed: .ci/sbom.lock requirements-runtime.lock
	@$(PYTHON) -m venv $(SBOM)
	@$(SBOM)/bin/python $(PIP) --only-binary :all: -r .ci/sbom.lock
	@$(PYTHON) -m venv --clear --without-pip $(SBOM)/runtime
	@PIP_PYTHON=$(SBOM)/runtime/bin/python $(SBOM)/bin/python $(PIP) --only-binary :all: -r requirements-runtime.lock
	@touch $@

tools: $(TOOLS)

golden: $(STAMP) ## compare golden streams and texts with the recorded ones (ARGS="--diff HEAD", ARGS=--write)
	@$(BIN)/python -m tests.golden $(ARGS)

demo: ## show simulated engines, a kvbus and routers on this machine (SECONDS=60)
	@PYTHON=$(PYTHON) .ci/demo.sh $(VENV)/demo $(if $(SECONDS),--seconds $(SECONDS),) $(ARGS)

$(DOCS)/.installed: .ci/docs.lock
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python $(PIP) --only-binary :all: -r .ci/docs.lock
	@touch $@

site: $(DOCS)/.installed ## build the documentation site in build/site/html and check its links (KVBUS_REPOSITORY=https://... for links to sources)
	@$(DOCS)/bin/python docs/site/build.py build/site
	@cd build/site && $(abspath $(DOCS))/bin/zensical build --strict --config-file zensical.toml
	@! grep -rnE '<(script|img|iframe)[^>]+src="?(https?:)?//|<link[^>]+rel="?(stylesheet|preconnect|icon)[^>]+href="?(https?:)?//|class="?mermaid' build/site/html

$(LINKS)/.installed: .ci/links.lock
	@$(PYTHON) -m venv $(LINKS)
	@$(LINKS)/bin/python $(PIP) --only-binary :all: -r .ci/links.lock
	@touch $@

links: site $(LINKS)/.installed ## follow each link from the site to other sites once (needs the network)
	@$(LINKS)/bin/linkchecker --check-extern --no-robots --no-status --ignore-url '^http://127\.0\.0\.1[:/]' build/site/html/index.html

test: $(STAMP) ## run the fast tests, two minutes (ARGS="tests/core -x" for all tests of a directory)
	@$(BIN)/python -m pytest -n 4 --dist loadgroup --tier fast $(ARGS)

test-all: $(STAMP) ## run all tests (those whose counterpart is not installed are skipped with a reason)
	@TEST_LONG=1 $(BIN)/python -m pytest -n 5 --dist loadgroup $(ARGS)

coverage: $(STAMP) ## run the suite and check that it covers enough of kvbus (ARGS="tests/core")
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -n 3 --dist loadgroup $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report $(if $(ARGS),--fail-under=0)

# with whatever others have released since: what the lock files would pin next, Kubernetes' schemas too
newest: ## run the suite with the newest dependencies and chart tools (ARGS="tests/core"), then newest-others
	@$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	@$(NEWEST)/bin/python -m pip install --quiet --editable . --group test helm-python-sdk kubernetes-validate
	@$(NEWEST)/bin/python -m pip freeze --exclude-editable
	@$(NEWEST)/bin/python -m pytest -n 3 --dist loadgroup $(ARGS)
	@$(if $(OTHERS_NEWEST),$(MAKE) --no-print-directory newest-others)

OTHERS_NEWEST ?= engines dynamo llmd aibrix vllm-router smg
newest-others: $(STAMP) ## run the tests of engines and routers with their newest releases (OTHERS_NEWEST="engines dynamo" RELEASE=pre)
	@for name in $(OTHERS_NEWEST); do \
		if [ $$name = engines ]; then set -- .ci/engines.sh $(NEWEST)/engines; else set -- .ci/routers.sh $(NEWEST)/routers $$name; fi; \
		NEWEST=$(or $(RELEASE),1) PYTHON=$(PYTHON) "$$@" || true; done
	@export TEST_ENGINES_HOME=$(CURDIR)/$(NEWEST)/engines TEST_ROUTERS_HOME=$(CURDIR)/$(NEWEST)/routers; \
		dynamo=$$TEST_ROUTERS_HOME/dynamo/bin/python; [ ! -x $$dynamo ] || export TEST_DYNAMO_PYTHON=$$dynamo; \
		$(BIN)/python -m pytest -n 2 --dist loadgroup tests/interop tests/conform tests/spec/test_published.py tests/discovery/test_grpc.py $(ARGS)

path: $(STAMP) ## measure the way of a batch as multiples of other programs (ARGS="--quick --only core", ARGS=--write)
	@$(BIN)/python -m bench.path $(ARGS)

bench: $(STAMP) ## measure late routers, many sources, memory and start (ARGS="--quick", ARGS="--only late", ARGS=--write)
	@$(BIN)/python -m bench $(ARGS)

bench-worth: $(STAMP) ## simulate how much prefill exact views save, three minutes (ARGS=--write, ARGS=--quick)
	@$(BIN)/python -m bench.worth $(ARGS)

chaos: $(STAMP) ## inject faults into real processes and sockets, and check exactness (FAULTS=10000 SEED=7 CELL=1 GENERATION=0 ROUNDS=3 SECONDS=600)
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) \
		$(if $(SECONDS),--seconds $(SECONDS)) $(if $(CELL),--cell $(CELL)) $(if $(GENERATION),--generation $(GENERATION)) \
		$(if $(FIRST),--first $(FIRST)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(WIDTH),--width $(WIDTH)) $(ARGS)

vopr: $(STAMP) ## run the daemon in simulated worlds (SEED=1 STEPS=1000000 SCRIPT=file)
	@$(BIN)/python -m tests.vopr $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(SCRIPT),--script $(SCRIPT)) $(ARGS)

# what cannot be had is said, and what needs it is left out
others: $(STAMP)
	@.ci/routers.sh $(VENV) dynamo || true
	@.ci/gozmq.sh $(VENV)/gozmq || true
	@.ci/routers.sh $(VENV)/routers || true

OTHERS := TEST_DYNAMO_PYTHON=$(CURDIR)/$(VENV)/dynamo/bin/python TEST_GOZMQ_HOME=$(CURDIR)/$(VENV)/gozmq \
	TEST_ROUTERS_HOME=$(CURDIR)/$(VENV)/routers

interop: others ## run other projects' routers in every case, and write docs/INTEROP.md (ARGS="--router AIBrix --case late")
	@$(OTHERS) $(BIN)/python -m tests.interop $(ARGS)

hours: others ## run one kvbus for an hour between real publishers and routers, and check exactness and memory (MINUTES=60)
	@PYTHON=$(BIN)/python .ci/engines.sh $(VENV)/engines || true
	@.ci/zmtp-peers.sh $(VENV)/zmtp-peers || true
	@$(OTHERS) TEST_ENGINES_HOME=$(CURDIR)/$(VENV)/engines TEST_ZMTP_PEERS_HOME=$(CURDIR)/$(VENV)/zmtp-peers \
		$(BIN)/python -m tests.interop.hours $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

real-engine: $(STAMP) ## run a real vLLM on the CPU in every case, 15 minutes, and write docs/REAL-ENGINE.md (ARGS="--engine gemma3")
	@.ci/real-engine.sh $(VENV)/real-engine
	@.ci/routers.sh $(VENV)/routers vllm-router
	@TEST_REAL_ENGINE_HOME=$(CURDIR)/$(VENV)/real-engine TEST_ROUTERS_HOME=$(CURDIR)/$(VENV)/routers \
		$(BIN)/python -m tests.real_engine $(ARGS)

soak: $(STAMP) ## run the relay against random engines and routers (STEPS=1000000 SEED=1)
	@$(BIN)/python -m tests.properties.soak $(if $(STEPS),--steps $(STEPS)) $(if $(SEED),--seed $(SEED))

explore: $(STAMP) ## try every order of events up to a depth (DEPTH=5 ARGS="--scene start --faults 3")
	@$(BIN)/python -m tests.exhaustive $(if $(DEPTH),--depth $(DEPTH)) $(ARGS)

fuzz: $(STAMP) ## fuzz codec, frames and relay, guided by coverage (SECONDS=60 for each)
	@$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r .ci/fuzz.lock
	@for target in codec frames relay; do \
		$(BIN)/python -m tests.fuzz.run $$target --seconds $(or $(SECONDS),60) --found .hypothesis/fuzz || exit 1; done

cost: $(STAMP) ## search for inputs that cost much CPU for their size (INPUTS=3000 SEED=1)
	@$(BIN)/python -m tests.cost.search $(if $(INPUTS),--inputs $(INPUTS)) $(if $(SEED),--seed $(SEED))

flood: $(STAMP) ## flood a kvbus to its limits, and show delay and memory (SECONDS=60)
	@FLOOD_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest -s tests/hostile/test_flood.py tests/hostile/test_crowd.py $(ARGS)

lint: $(STAMP) ## run ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## reformat the code, and let ruff fix problems
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

charts: $(TOOLS) ## lint and render both charts, and check the result with Kubernetes' schemas and kvbus
	@$(BIN)/python -m pytest -n 2 --dist loadgroup tests/chart $(ARGS)

platforms: $(TOOLS) ## check the pods of other platforms with their own definitions (needs Go, ten minutes)
	@.ci/platforms.sh $(VENV)/platforms
	@TEST_PLATFORMS_HOME=$(CURDIR)/$(VENV)/platforms $(BIN)/python -m pytest tests/chart/test_inject.py tests/chart/test_component.py tests/docs/test_platforms.py $(ARGS)

cluster: $(TOOLS) ## test charts, discovery and rights on a real Kubernetes API server (needs Go, 45 minutes to build it once)
	@.ci/cluster.sh $(VENV)/cluster
	@TEST_KUBERNETES=$(CURDIR)/$(VENV)/cluster $(BIN)/python -m pytest tests/cluster $(ARGS)

dockerfile: $(TOOLS) ## lint the Dockerfile
	@$(BIN)/hadolint Dockerfile

wheel: $(STAMP) $(BUILD)/.installed ## build sdist and wheel in dist/, and run the wheel once
	@rm -rf dist
	@$(DATED) $(BUILD)/bin/python -m hatchling build -d dist
	@PYTHONPATH=$$(echo dist/*.whl) $(BIN)/python -P -m kvbus --version | grep -Fx "kvbus $(VERSION)"

client-wheel: wheel ## build the wheel of the client library in dist/, and install it alone and beside kvbus
	@$(DATED) $(BUILD)/bin/python -m tools.client_wheel dist
	@TEST_WHEELS=dist $(BIN)/python -m pytest -q tests/client/test_wheel.py

image: ## build the container image (IMAGE=kvbus:local PLATFORMS=linux/amd64,linux/arm64 ARGS=--push)
	@$(DATED) $(DOCKER) $(if $(PLATFORMS),buildx build --platform $(PLATFORMS),build) $(IMAGE:%=--tag %) \
		--build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) $(ARGS) .

image-layout: ## build the image for this machine's architecture as an OCI layout in build/image (needs docker buildx)
	@rm -rf build/image
	@mkdir -p build/image
	@$(MAKE) --no-print-directory image PLATFORMS=linux/$(ARCHITECTURE) ARGS="--provenance=false \
		--output type=oci,tar=false,rewrite-timestamp=true,dest=build/image/$(ARCHITECTURE)"

release-check: $(STAMP) ## check that the tree is clean, versions agree, and the changelog has a section (TAG=v1.2.3)
	@$(BIN)/python -m tools.release check $(TAG)

release: release-check ## build all files of a release in build/release, and publish nothing (PARTS= without docker)
	@rm -rf build/image
	@$(MAKE) --no-print-directory wheel client-wheel
	@$(if $(PARTS),$(MAKE) --no-print-directory $(PARTS))
	@$(MAKE) --no-print-directory assemble

assemble: $(TOOLS) $(SBOM)/.installed ## add charts, SBOM, notes and checksums to the built files (TAG=v1.2.3 ARGS=--complete)
	@$(DATED) SBOM_HOME=$(SBOM) $(BIN)/python -m tools.release assemble $(TAG) $(ARGS)
	@cd build/release && sha256sum --check --quiet SHA256SUMS

release-rehearsal: $(BUILD)/.installed ## rehearse a release with the built files, and check that the wheels can be reproduced
	@rm -rf build/image build/again
	@if [ -n "$$TEST_IMAGE_HOME" ]; then mkdir -p build/image && "$$TEST_IMAGE_HOME/podman" save --quiet --format oci-dir \
		--output build/image/$(ARCHITECTURE) localhost/kvbus:ci; fi
	@$(MAKE) --no-print-directory assemble TAG= ARGS=--rehearsal
	@$(DATED) $(BUILD)/bin/python -m hatchling build -d build/again >/dev/null 2>&1
	@$(DATED) $(BUILD)/bin/python -m tools.client_wheel build/again >/dev/null
	@for file in build/again/*; do cmp "$$file" build/release/$$(basename $$file) || exit 1; done
	@TEST_RELEASE=build/release $(BIN)/python -m pytest -q tests/docs/test_release.py::test_a_release_has_checksums_notes_and_a_bill_of_materials

version: ## print the version in pyproject.toml
	@echo $(VERSION)

lock: ## pin all dependencies again (needs uv)
	uv pip compile pyproject.toml --group dev --universal --generate-hashes --no-header -o requirements.lock

clean: ## delete the environment and all caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
