#!/usr/bin/env bash
# Builds the driver of tests/cuda for the CPU: tests/cuda/emulator/build.sh FOLDER makes FOLDER/emulated_driver. CXX is
# the compiler (default: g++), of CXXFLAGS the last word.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=$1
mkdir -p "$out"
# Kernels see the same memory as several types, which CUDA lets them, and round every product and sum by itself.
flags=(-std=c++20 -O1 -g1 -pthread -Wall -Wno-unknown-pragmas -fno-strict-aliasing -ffp-contract=off
  -fno-extern-tls-init -fsanitize=address,undefined -fno-sanitize-recover=undefined)
read -ra added <<<"${CXXFLAGS:-}"
compile=("${CXX:-g++}" "${flags[@]}" "${added[@]}" -I"$here/include" -I"$root")
objects=()
pids=()
for file in "$here"/*.cc; do
  object=$out/$(basename "$file" .cc).o
  objects+=("$object")
  while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n; done
  "${compile[@]}" -c "$file" -o "$object" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
"${compile[@]}" "${objects[@]}" -o "$out/emulated_driver"
