# Each target makes .venv when it is missing: one command on a fresh machine.
PYTHON ?= python3
# Marks of what is installed: all that users need, and also what the tests and the checks need.
INSTALLED := .venv/installed
DEVELOPING := .venv/developing
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# The set of versions that is installed, and the value of CUDA that asked for it, if one did.
RECORDED := $(shell cat .venv/cuda 2>/dev/null)

# The CPU on purpose, where a GPU would be an error. DeepSpeed sets CUDA_VISIBLE_DEVICES for its ranks, also on a CPU.
ifeq ($(or $(CUDA),$(word 2,$(RECORDED))),cpu)
export CUDA_VISIBLE_DEVICES :=
DEVICE := --performance.device cpu
endif

.PHONY: demo demo-t2i wheel test test-gpu test-nightly test-faults test-cluster lint docs bench

# Real digit scans -> latent shards -> a DiT whose training is killed and resumes -> new digits, measured; `fastdiff demo --watch` shows it live.
demo: $(INSTALLED)
	fastdiff demo $(if $(DEVICE),-- $(DEVICE))

# MODEL=dit, or unet: the same scans with captions in words -> latents and embeddings -> a trained UNet -> a pipeline that diffusers loads.
ifeq ($(or $(MODEL),unet),unet)
demo-t2i: $(INSTALLED)
	test -d data/digits-t2i || python -m fastdiff.cli.demo_t2i prepare data/digits-t2i
	test -f data/digits-t2i/latents/dataset.json || fastdiff encode data/digits-t2i/images data/digits-t2i/latents \
		--pretrained data/digits-t2i/pipeline --resolution 32 --batch 64
	fastdiff train --preset digits-t2i --deepspeed_config zero3 $(DEVICE)
	test -d runs/digits-t2i/pipeline || fastdiff export runs/digits-t2i runs/digits-t2i/pipeline --format diffusers
	python -m fastdiff.cli.demo_t2i judge runs/digits-t2i/pipeline --picture runs/digits-t2i/digits.png
else ifeq ($(MODEL),dit)
# A text DiT with a tiny T5, whose training is killed and resumes.
demo-t2i: $(INSTALLED)
	test -d data/digits-t2i-dit || python -m fastdiff.cli.demo_t2i prepare data/digits-t2i-dit --model dit
	test -f data/digits-t2i-dit/latents/dataset.json || fastdiff encode data/digits-t2i-dit/images data/digits-t2i-dit/latents \
		--pretrained data/digits-t2i-dit/pipeline --resolution 32 --batch 64
	python -m fastdiff.cli.demo_t2i train runs/digits-t2i-dit -- --preset digits-t2i-dit --deepspeed_config zero3 $(DEVICE)
	test -d runs/digits-t2i-dit/pipeline || fastdiff export runs/digits-t2i-dit runs/digits-t2i-dit/pipeline --format diffusers
	python -m fastdiff.cli.demo_t2i judge runs/digits-t2i-dit/pipeline --picture runs/digits-t2i-dit/digits.png --guidance 2
else
demo-t2i:
	$(error MODEL=$(MODEL): expected unet or dit)
endif

# Three workers for two cores, because most tests wait for processes that they start, and some for time to pass; one
# thread each, because more threads than cores wait for one another. Files run in the order of conftest.py, the longest
# first. Bytecode is cached even where the environment forbids it, because hundreds of processes would compile it again.
# They are forks of one process that has imported everything, and share its memory (tests/support/worker.py).
# They hide a GPU: the kernels run in Triton's interpreter, and two ranks need no two GPUs.
ON_CPU := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
WORKERS := $(ON_CPU) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
	python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(DEVELOPING)
	$(WORKERS) --junitxml .reports/tests.xml

# On a machine with a GPU: the kernels compiled for it, and every test that needs one. Only the first command shares the
# GPU among its tests, because some of the others time something.
ON_GPU := env -u TRITON_INTERPRET python -m pytest --gpu
test-gpu: $(DEVELOPING)
	$(ON_GPU) --numprocesses 4 --junitxml .reports/gpu.xml tests/ops tests/gpu
	$(ON_GPU) --junitxml .reports/gpu-alone.xml --ignore tests/ops --ignore tests/gpu

# The long trials, before a release: more kills, full-size networks, every size of a kernel.
test-nightly: $(DEVELOPING)
	$(WORKERS) -m "nightly and not cluster" --nightly --timeout 7200 --junitxml .reports/nightly.xml

# A real Slurm, ssh and pulled cables, on machines made of Linux namespaces; as root. Installs what is missing (Debian).
test-cluster: $(DEVELOPING)
	bash tests/slurm/install.sh
	$(ON_CPU) python -m pytest -m cluster --junitxml .reports/cluster.xml tests/slurm

# Every fault of docs/reliability.md, and the table there: in a night, or with NIGHTLY= as often as the tests.
NIGHTLY ?= --nightly --timeout 7200
test-faults: $(DEVELOPING)
	bash tests/slurm/install.sh
	rm -rf .reports
	-$(WORKERS) -m "fault and not cluster" $(NIGHTLY) --junitxml .reports/tests.xml
	-$(ON_CPU) python -m pytest -m "fault and cluster" $(NIGHTLY) --junitxml .reports/cluster.xml tests/slurm
	python -m tests.support.reports.fault_table .reports/*.xml

lint: $(DEVELOPING)
	ruff check .
	ruff format --check .
	mypy

# The site of the documentation, in .site/; a broken link is an error.
docs: $(DEVELOPING)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

# In dist/: one wheel with everything, and the versions to install it with (README).
wheel:
	rm -rf dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	cp constraints*.txt dist/

# On a machine with a GPU: the kernels' tests and speed; the record goes to bench/results/.
bench: $(DEVELOPING)
	bash bench/gpu.sh

# CUDA=12, CUDA=13 or CUDA=cpu instead of what install.py chooses by the driver; a change of it installs anew.
ifneq ($(CUDA),)
ifneq ($(CUDA),$(firstword $(RECORDED)))
$(INSTALLED) $(DEVELOPING): anew
endif
endif
.PHONY: anew
anew:

SETUP := install.py pyproject.toml kernels/pyproject.toml fastdiff/version.py kernels/fastdiff_kernels/__init__.py \
	constraints-common.txt constraints.txt constraints-cu12.txt
$(INSTALLED): $(SETUP)
	CUDA=$(CUDA) $(PYTHON) install.py

$(DEVELOPING): $(SETUP)
	CUDA=$(CUDA) $(PYTHON) install.py --dev
