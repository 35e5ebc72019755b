#!/bin/sh
# Builds the native core into src/ringway/ with the installed Python, CMake and nanobind. Installs and downloads nothing,
# for hosts without a package index. Then run with PYTHONPATH=src.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tag=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
cmake -S . -B "build/in-place-$tag" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" ${GENERATOR:+-G "$GENERATOR"}
cmake --build "build/in-place-$tag" --parallel
cp "build/in-place-$tag"/_core*.so src/ringway/
echo "built src/ringway/$(basename "build/in-place-$tag"/_core*.so)"
