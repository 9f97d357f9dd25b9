#!/bin/sh
# Makes the environment $VENV with the interpreter $PYTHON (default: the first fit one on PATH) and installs this
# checkout into it, editable, with the extras $EXTRAS. $PIN holds pip to the versions it lists.
set -eu

# Runs rather than looks: a name on PATH may be a pyenv shim of a version that isn't active, and a distribution's
# Python may lack venv.
fits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  candidates=${PYTHON:-python3 python3.13 python3.12 python3.11}
  for candidate in $candidates; do
    if fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: expected Python 3.11 or later with its venv module, got none among: $candidates." >&2
  echo "setup: install one (on Debian python3-venv too), or name it: make ... PYTHON=/path/to/python" >&2
  exit 1
}

# Python alone is enough to train and test: without a C++ compiler the compiled module is left out.
has_compiler() {
  for compiler in "${CXX:-c++}" g++ clang++; do
    command -v "$compiler" >/dev/null 2>&1 && return
  done
  return 1
}

if [ ! -x "$VENV/bin/python" ] || ! fits "$VENV/bin/python"; then
  python=$(find_python)
  echo "setup: $VENV with $("$python" --version) at $python"
  "$python" -m venv --clear "$VENV"
fi

if ! has_compiler; then
  echo "setup: no C++ compiler on PATH, so the compiled module is left out" >&2
  export JAX_EP_PURE=1
fi

pins="$VENV/pins.txt"
printf '%s\n' ${PIN:-} >"$pins"
"$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --quiet \
  --constraint "$pins" --editable ".[${EXTRAS:-dev}]"
echo "setup: done, jax $("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("jax"))')"
