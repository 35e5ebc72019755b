#!/usr/bin/env bash
# Proves the ccl backend on the real oneCCL, on an x86_64 host with g++, cmake and a Python that has torch:
#   scripts/ccl_proof.sh ARCHIVE [--output FILE] [--commit HASH]
# ARCHIVE comes from scripts/oneccl-gather, which runs anywhere. This script installs and downloads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(uname -m)" = x86_64 ] || { echo "oneCCL exists for x86_64 only, and this is $(uname -m)"; exit 2; }
archive=${1:?usage: scripts/ccl_proof.sh ARCHIVE [--output FILE] [--commit HASH]}; shift
python=${PYTHON:-python3}
export CCL_ROOT="$PWD/.cache/oneccl/linked"
[ -e "$CCL_ROOT/lib/ccl/cpu/lib/libccl.so.1" ] || scripts/oneccl-link "$archive" "$CCL_ROOT"
export PYTHONPATH="src:scripts${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import ringway._core' 2>/dev/null || PYTHON="$python" scripts/build_in_place.sh
export LD_LIBRARY_PATH="$CCL_ROOT/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" FI_PROVIDER="${FI_PROVIDER:-tcp}"
exec "$python" scripts/ccl_proof.py "$@"
