# Everything a person types. `make demo` shows the whole path on this machine, `make test` proves it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: help
help: ## Show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# ---- the tools -------------------------------------------------------------------------------------------------

$(VENV)/.runtime: requirements/runtime.txt pyproject.toml
	@lab/venv requirements/runtime.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	@lab/venv requirements/dev.txt
	@touch $@

.PHONY: venv
venv: $(VENV)/.runtime ## Make the virtual environment from pinned, hashed requirements

.PHONY: lock
lock: ## Resolve requirements/*.in again (for maintainers)
	$(BIN)/python -m pip install --quiet uv
	cd requirements && for f in runtime dev; do \
	  ../$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --python-version 3.11 \
	    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command 'make lock' $$f.in -o $$f.txt; done

# ---- the lab ---------------------------------------------------------------------------------------------------

.PHONY: lab
lab: built-lab ## Build the lab and bring up one bare host
	@lab/up

.PHONY: demo
demo: lab ## From a bare lab host to a proven endpoint, with the command to try it
	@lab/demo

.PHONY: demo-down
demo-down: ## Remove everything the demo made (caches stay; `make clean` removes those)
	@lab/down

.PHONY: clean
clean: demo-down ## Remove the lab's images and caches as well
	@lab/clean

# ---- the proof -------------------------------------------------------------------------------------------------

.PHONY: lint
lint: $(VENV)/.dev ## Ruff, mypy, yamllint, ansible-lint, shell syntax
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --offline --strict
	bash -n lab/install lab/dockerd lab/build lab/up lab/down lab/demo lab/clean lab/push lab/venv lab/promtool lab/engine/lock lab/sglang/lock lab/vm/build lab/vm/vm lab/vm/serve \
	  lab/nvidia/repository lab/nvidia/packages/driver/build .ci/run

.PHONY: unit
unit: $(VENV)/.dev ## Unit tests
	python -m pytest

.PHONY: controller
controller: $(VENV)/.dev ## AWX without AWX: its objects, surveys, jobs, image context and rulebook
	python -m pytest tests/awx

# Asked first, before minutes of downloads.
.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo 'the lab builds systems and runs containers, which needs root: sudo make ...' >&2; exit 1; }

.PHONY: built-lab
built-lab: root $(VENV)/.runtime
	@lab/install
	@lab/dockerd start
	@lab/build

# SGLang's image and small model as well, which only its own tests need.
.PHONY: built-sglang
built-sglang: built-lab
	@lab/build sglang

.PHONY: differential
differential: root $(VENV)/.dev built-lab built-sglang ## The planner against the real engines' own code and starts, in the lab's images
	METALSERVE_REQUIRE_ENGINE=1 python -m pytest tests/differential

.PHONY: test-default
test-default: root $(VENV)/.dev built-lab ## Scenario default: bare host to proven endpoint, on a container with systemd
	molecule test --scenario-name default

.PHONY: test-toolkit
test-toolkit: root $(VENV)/.dev built-lab ## Scenario toolkit: container toolkit and health, on a container with systemd
	molecule test --scenario-name toolkit

.PHONY: test-driver
test-driver: root $(VENV)/.dev ## Scenario driver: the driver on a virtual machine that really reboots, with simulated GPUs (lab/README.md)
	@lab/install vm
	@lab/dockerd start
	molecule test --scenario-name driver

.PHONY: test-engines
test-engines: root $(VENV)/.dev built-lab ## Releases with the real vLLM: change, refusal, the way back, death, reboot
	molecule test --scenario-name engines

.PHONY: test-sglang
test-sglang: root $(VENV)/.dev built-sglang ## Scenario sglang: SGLang's real server on the CPU, served by the same site.yml
	molecule test --scenario-name sglang

# Not part of `make test`: it loads real packages from Debian's non-free.
.PHONY: test-packages
test-packages: root $(VENV)/.dev ## The role's choice of packages against NVIDIA's real ones in Debian's non-free
	@lab/install
	@lab/dockerd start
	python -m pytest tests/packages

.PHONY: test-gateway
test-gateway: root $(VENV)/.dev built-lab ## Scenario gateway: a real HAProxy with stand-ins for the engines
	molecule test --scenario-name gateway

.PHONY: test-airgap
test-airgap: root $(VENV)/.dev built-lab ## Scenario airgap: a host with no way out, site.yml from a bundle to a proven endpoint
	molecule test --scenario-name airgap

.PHONY: test-awx
test-awx: root $(VENV)/.dev built-lab ## Scenario awx: AWX's templates on a lab host, on ansible-runner as AWX runs them
	molecule test --scenario-name awx

.PHONY: test-monitoring
test-monitoring: root $(VENV)/.dev built-lab ## Scenario monitoring: a real Prometheus on a real vLLM, HAProxy and node exporter
	molecule test --scenario-name monitoring

.PHONY: rules
rules: $(VENV)/.dev ## Alerts in promtool's hands: each one firing and silent; names of metrics against recorded outputs
	python -m pytest tests/monitoring/rules

.PHONY: dashboards
dashboards: $(VENV)/.dev ## Make the dashboards' JSON of their code again (for maintainers)
	python -m metalserve.monitoring.dashboards roles/monitoring/files/dashboards

.PHONY: pictures
pictures: $(VENV)/.runtime ## Draw the docs' pictures again; needs Debian's chromium (for maintainers)
	python docs/pictures/make.py

.PHONY: test-fleet
test-fleet: root $(VENV)/.dev built-lab ## Scenario fleet: rollouts over three hosts with the real vLLM behind one gateway, under load
	molecule test --scenario-name fleet

.PHONY: scenarios
scenarios: root $(VENV)/.dev ## The scenarios whose inputs changed since they last passed on this machine
	python molecule/scenarios.py $(SCENARIO_OPTIONS)

.PHONY: test
test: lint unit controller rules differential scenarios ## All of it, less the scenarios that passed with the same inputs

.PHONY: test-all
test-all: SCENARIO_OPTIONS = --all
test-all: test ## All of it

.PHONY: ci-clean
ci-clean: ## Stop what the tests started: scenario hosts, registry, mirror, and the daemon if it was started here
	@lab/vm/vm stop
	@lab/vm/serve stop
	@lab/down

.PHONY: bench
bench: $(VENV)/.dev ## Measure the times of demo, no-change run and start, and print a table
	python benchmarks/measure.py
