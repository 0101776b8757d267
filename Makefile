# make train   set up, train the tiny SAMU model on the embedded corpus, evaluate it, sample from it
# make test    set up, then run the whole suite (lint, format and types included)
#              (two workers, one thread each: the suite is many small computations)
# make setup   the environment alone: .venv, with PyTorch for the CPU where there is no NVIDIA GPU

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
RUN := runs/tiny-$(shell date +%Y%m%d-%H%M%S)
TRAIN_ARGS ?=
PROMPT ?= def 

# The CPU constraints pin what the tests run with; with a GPU the default CUDA build of PyTorch is taken.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints/cpu.txt)
STAMP := $(VENV)/.installed$(if $(HAS_GPU),-gpu,-cpu)

.PHONY: setup train test lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" $(VENV)/bin/uv pip install --quiet --python $(PY) $(CONSTRAINTS) -e '.[dev]'
	touch $@

train: $(STAMP)
	$(PY) train.py experiment=tiny hydra.run.dir='$(RUN)' $(TRAIN_ARGS)
	$(PY) eval.py checkpoint='$(RUN)/checkpoints/best.ckpt' hydra.run.dir='$(RUN)/evaluation'
	$(PY) eval.py checkpoint='$(RUN)/checkpoints/best.ckpt' hydra.run.dir='$(RUN)/sample' prompt='$(PROMPT)'
	@echo "Training curve: $(RUN)/curve.png"

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
