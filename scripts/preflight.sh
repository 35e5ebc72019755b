#!/bin/sh
# Checks what the machine needs before the setup, and says how to install what is missing.
python=${1:-python3}
fail() { printf 'ringway: %s\n' "$1" >&2; exit 1; }
command -v "$python" >/dev/null 2>&1 || fail "no '$python' here; install Python 3.10 or newer (Debian, Ubuntu: apt install python3)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$python" --version) is too old; Python 3.10 or newer is needed (make PYTHON=/path/to/python3.12)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "'$python' cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$headers/Python.h" ] || fail "no Python headers in $headers (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
for cxx in "${CXX:-c++}" g++ clang++; do command -v "$cxx" >/dev/null 2>&1 && exit 0; done
fail "no C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
