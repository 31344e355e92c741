# serve: a first answer in one command.  test: what CI runs.  check: the part of it without tests.
PYTHON ?= python3
# The default build of torch where there is an NVIDIA GPU; a fixed one elsewhere. On Linux without
# a GPU, torch's own index has a build without CUDA: make TORCH="torch --index-url ADDRESS".
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
MODEL ?= flint-nano

RUN := .venv/bin/python
PIP = $(PYTHON) -m pip --python $(RUN) --disable-pip-version-check install --quiet
# Whole: no install was cut short, its Python still runs, and it runs this very checkout.
WHOLE := $(shell test ! -e .venv/unfinished && $(RUN) -I -c "import limelight, os; \
	print(os.path.samefile(limelight.__path__[0], 'limelight') or '')" 2>/dev/null)

.PHONY: serve test check fmt bench again
.DELETE_ON_ERROR:

serve: .venv/installed
	$(RUN) -m limelight serve $(MODEL) --host 127.0.0.1 --port 8000

test: check
	$(RUN) -m pytest -q -n auto --maxprocesses 4 --dist loadfile

check: .venv/installed-test
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

fmt: .venv/installed-test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: .venv/installed-test
	$(RUN) -m limelight bench decode $(MODEL) --context 256 --compare transformers --rounds 3
	$(RUN) -m limelight bench prefill $(MODEL) --context 512

.venv/installed: pyproject.toml $(if $(WHOLE),,again)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
		'Python 3.11 or newer is needed: make PYTHON=python3.12')"
	$(if $(WHOLE),,$(PYTHON) -m venv --clear --without-pip .venv)
	@touch .venv/unfinished
	$(PIP) $(TORCH)
	$(PIP) --editable .
	@rm .venv/unfinished && touch $@

.venv/installed-test: .venv/installed
	@touch .venv/unfinished
	$(PIP) --editable ".[test]"
	@rm .venv/unfinished && touch $@
