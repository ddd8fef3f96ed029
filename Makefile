# Each target makes .venv when it is missing: one command on a fresh machine.
PYTHON ?= python3
INSTALLED := .venv/installed
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test lint

# Real digit scans -> latent shards -> a trained DiT -> new digits, measured.
demo: $(INSTALLED)
	test -f data/digits/dataset.json || fastdiff encode digits data/digits
	deepspeed fastdiff/train.py --preset digits --deepspeed_config deepspeed_configs/zero3.json
	fastdiff evaluate runs/digits

test: $(INSTALLED)
	python -m pytest

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --quiet torch triton
	PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --quiet --editable ".[dali,xformers,peft,dev]"
	touch $@
