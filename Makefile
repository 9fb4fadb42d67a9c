# Everything runs in .venv, which scripts/env.sh makes. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env model redis demo demo-shared conversation test drills bench bench-index quality \
	check fmt wheel clean

# Safe path: run from here, the folder sched/ must not hide the standard library's module.
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1
unexport PYTHONPATH

PY := .venv/bin/python
MODEL := $$($(PY) -m sglang_ext.scripts.model)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

env:  ## make .venv: pinned packages from the user's cache, and our wheels (FRESH=1: no cache)
	@scripts/env.sh

model: env  ## fetch and convert the small model, once per user
	@$(PY) -m sglang_ext.scripts.model

demo: model  ## serve the small model with and without PIC; one table, build/demo.json
	@model=$(MODEL); exec $(PY) -m sglang_ext.scripts.demo --model "$$model"

redis:  ## see that redis-server is there; installs it on Debian as root
	@scripts/redis.sh

demo-shared: model redis  ## two servers and one Redis; build/demo-shared.json
	@model=$(MODEL); exec $(PY) -m sglang_ext.scripts.demo_shared --model "$$model"

test: model redis check  ## every check and every test
	@export PIC_MODEL=; PIC_MODEL=$(MODEL); exec $(PY) -m pytest

conversation: model  ## six turns over documents, plain and PIC; build/conversation.json
	@model=$(MODEL); exec $(PY) -m sglang_ext.scripts.conversation --model "$$model"

drills: model redis  ## kill, stop, fill and damage what servers share; build/drills.json
	@export PIC_MODEL=; PIC_MODEL=$(MODEL); exec $(PY) -m pytest tests/drills

bench-index: env redis  ## the shared index with a million entries; build/bench-index.json
	@exec $(PY) -m sglang_ext.scripts.bench_index

bench: model  ## interleaved plain and PIC pairs; build/bench.json and a plot
	@model=$(MODEL); exec $(PY) -m sglang_ext.scripts.bench --model "$$model"

quality: model  ## quality of every strategy against full prefill; build/quality.json and plots
	@model=$$($(PY) -m sglang_ext.scripts.model --adapter scripts/quality/adapter); \
		exec $(PY) -m sglang_ext.scripts.quality.run --model "$$model"

check: env  ## lint, format, types, import layers, wheel contents
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	$(PY) -m check_wheel_contents .venv/wheels/sglang_pic-*.whl

fmt: env  ## fix what ruff can fix, and format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

wheel: env  ## build both wheels into dist/
	rm -rf dist
	scripts/wheels.sh build $(PY) dist

clean:  ## remove .venv and all that was built here; the user's cache stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
