#!/bin/sh
# check_wheel.sh PYTHON PIN...: builds the wheel once with PYTHON and loads it beside each PIN of jax and jaxlib in
# turn. Away from the checkout, so that what is imported is the wheel.
set -eu

python=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@" --quiet --progress-bar off; }
pip wheel --no-deps --wheel-dir "$work" "$root"
wheel=$(echo "$work"/jax_ep-*.whl)
size=$(wc -c <"$wheel")
echo "wheel: $(basename "$wheel"), $size bytes"
[ "$size" -lt 20000000 ] || { echo "wheel: expected fewer than 20 MB" >&2; exit 1; }

cd "$work"
for pin in "$@"; do
  # shellcheck disable=SC2086  # a pin is several requirements
  pip install "$wheel" $pin
  "$work/venv/bin/python" -c '
import jax, jax_ep
info = jax_ep.build_info()
assert info["extension"], info["reason"]
jax.block_until_ready(jax.numpy.zeros(1))  # a module that this jaxlib refuses would take the backend down with it
print("wheel: with jax", jax.__version__, info)'
done
