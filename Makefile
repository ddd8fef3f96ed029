# Each target makes .venv when it is missing: one command on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet torch triton
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable ".[dali,xformers,peft,dev]"
	touch $@

# Real digit scans -> latent shards -> a trained DiT -> new digits, measured.
demo: $(INSTALLED)
	test -f data/digits/dataset.json || $(BIN)/fastdiff encode digits data/digits
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed fastdiff/train.py --preset digits --deepspeed_config deepspeed_configs/zero3.json
	$(BIN)/fastdiff evaluate runs/digits

test: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
