# The two commands of the README: `make demo` and `make test`. Each sets up its own environment first.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
CKPT ?=

.PHONY: demo test quality style clean

# torch goes first: packages that only ask for "torch" must find the pinned one. For the tests of the kernels, Triton runs on
# the CPU, and `kernels` loads a local folder; what else they ask for is not used.
$(VENV)/.ready: constraints.txt setup.py
	@echo "Installing into $(VENV), once; pip is silent meanwhile. 1 of 3: torch, the largest. A minute or two; more on a slow line."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@echo "2 of 3: transformers and what the demo and the tests need beside it. About a minute."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@echo "3 of 3: triton and kernels (Linux). Seconds."
	$(if $(filter Linux,$(shell uname)),$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps triton kernels)
	touch $@

# Threads that spin while they wait for each other crawl where another program keeps a core busy.
demo: export OMP_WAIT_POLICY = PASSIVE
demo: $(VENV)/.ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m examples.demo $(CKPT)
	$(if $(CKPT),,HF_HUB_OFFLINE=1 $(BIN)/python -m examples.digits)

test: $(VENV)/.ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quiet

quality: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .demo .pytest_cache .ruff_cache .hypothesis
