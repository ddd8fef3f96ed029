# Each target makes .venv when it is missing: one command on a fresh machine.
PYTHON ?= python3
INSTALLED := .venv/installed
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test lint bench

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

# On a machine with a GPU: the kernels' tests and speed; the record goes to bench/results/.
bench: $(INSTALLED)
	bash bench/gpu.sh

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --quiet torch triton
	PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip install --quiet --editable ".[dali,xformers,peft,remote,hf,dev]"
	touch $@
