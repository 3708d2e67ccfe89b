# Everything people type here. Each target first makes or refreshes .venv; nothing happens when it is up to date.
.DEFAULT_GOAL := help
.PHONY: help setup system nvcc demo demo-images lint test test-ci test-slow test-gpu canary bench clean docs
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
export VENV
export PATH := $(abspath $(VENV))/bin:$(PATH)

# What tests/cluster makes hosts and clusters of; it skips with a reason what is missing.
CLUSTER := slurm-wlm munge openmpi-bin openssh-server openssh-client pdsh iproute2 bindfs
SYSTEM := chromium $(CLUSTER)
# Two processes, for ranks and commands wait much of their time. A file stays in one, with what its tests share.
PYTEST := pytest -n 2 --dist loadfile --no-loadscope-reorder
# The fast tests that launch ranks run one at a time: two ranks already use two cores.
LAUNCHING := tests/distributed tests/integration tests/cluster
OTHERS := tests/numerics tests/unit tests/gpu
# These two take minutes in a single test, so they begin first.
ALL := tests/chaos tests/servers $(LAUNCHING) $(OTHERS)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

setup:  ## make or refresh .venv with the pinned dependencies
	@scripts/setup.sh

system:  ## Debian's packages that tests need: Chromium, SLURM, MPI, ssh
	@scripts/system.sh $(SYSTEM)

nvcc: setup  ## CUDA's compiler for the test that compiles ops/csrc, where the machine has none
	@scripts/nvcc.sh

demo: setup  ## fine-tune SmolLM2-135M with LoRA: about 3 minutes on 2 CPU cores, less on GPUs
	@overrides=$$(python -m examples.demo) && eval "zerolora train configs/demo.yaml $$overrides"

demo-images: setup  ## a tiny Stable Diffusion learns to draw by night: minutes on 2 CPU cores
	@overrides=$$(python -m examples.demo_images) && eval "zerolora train configs/demo-images.yaml $$overrides"

lint: setup  ## ruff, clang-format, typos, mypy (strict), import-linter, deptry, links of the documentation
	ruff check .
	ruff format --check .
	clang-format --dry-run --Werror ops/csrc/*/*
	typos
	mypy
	lint-imports --no-logo
	deptry .
	NO_MKDOCS_2_WARNING=1 mkdocs build -q

docs: setup  ## the documentation as a site, in runs/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build -q && echo runs/site/index.html

test: lint  ## lint and the fast tests of one process: about 15 minutes on 2 cores
	$(PYTEST) -m "not slow" $(OTHERS)

test-ci: setup  ## what CI runs after them: tests that launch ranks, two hosts, SLURM, MPI, ssh, restarts
	@scripts/system.sh $(SYSTEM)
	pytest -m "not slow" $(LAUNCHING)
	$(PYTEST) -m "slow and not nightly" --timeout 1800 $(ALL)

test-slow: setup  ## these, and those of minutes each: injected faults, lost nodes, preemption, vLLM
	@scripts/system.sh $(SYSTEM)
	$(PYTEST) -m slow --timeout 1800 $(ALL)

test-gpu: setup  ## the tests that need an NVIDIA GPU
	pytest -m gpu tests

canary:  ## the distributed tests on the newest release of each dependency but torch, in .venv-canary
	scripts/canary.sh

bench: setup  ## measure this machine; nothing is asserted
	for file in tests/bench/bench_*.py; do echo "== $$file"; python -m "tests.bench.$$(basename "$$file" .py)"; done

clean:  ## remove what the tools left here; runs/ and .venv stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
