# make train | test | check: each sets up what it needs, once, in an environment of its own. The variables are read at
# set-up, so another PYTHON, PIN or EXTRAS wants another VENV:
#   PYTHON=python3.12   the interpreter (default: the first of 3.11 or later on PATH)
#   VENV=.venv          where the environment goes
#   PIN="jax==0.10.2 jaxlib==0.10.2"   versions to hold pip to
#   EXTRAS=dev,cuda13   the extras to install (default: dev, which has all that train, test and check need)
#   ARGS="..."          passed on to the example or to pytest

VENV ?= .venv
PYTHON ?=
PIN ?=
EXTRAS ?= dev
ARGS ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
CXX_FILES = $(wildcard xla_ffi/*.cc xla_ffi/*.h cuda/*.cc cuda/*.cu cuda/*.h cuda/*.cuh)
CXX_TESTS = $(foreach d,. side_stream emulator emulator/include emulator/include/cuda,\
  $(wildcard $(addprefix tests/cuda/$(d)/*.,cu cc h cuh)))

.DELETE_ON_ERROR:
.PHONY: help train test check format setup clean

help:
	@sed -n '1,7s/^# *//p' Makefile

train: $(READY)
	$(RUN) examples/train_moe.py $(ARGS)

# Two processes: compiling, which is most of the work, keeps one core busy each. A file stays in one process, where
# its cases share compiled programs.
test: $(READY)
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES) $(CXX_TESTS)

format: $(READY)
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES) $(CXX_TESTS)

setup: $(READY)

# The package is installed to run from this checkout, so only what is compiled, or declared, makes it stale.
$(READY): pyproject.toml CMakeLists.txt tools/setup.sh jax_ep/_version.py $(CXX_FILES)
	PYTHON="$(PYTHON)" VENV="$(VENV)" PIN="$(PIN)" EXTRAS="$(EXTRAS)" tools/setup.sh
	@touch $@

clean:
	rm -rf $(VENV) build dist out
