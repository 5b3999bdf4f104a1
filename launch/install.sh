#!/usr/bin/env bash
# Make .venv and install the project into it with the tested versions. Run again, it does only what is missing.
#
#   PYTHON           interpreter to use (default: python3; 3.10 or newer)
#   TORCH_INDEX_URL  where to take PyTorch from; https://download.pytorch.org/whl/cpu saves gigabytes without a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2; exit 2; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no '$python' on PATH; install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" -V 2>&1); Python 3.10 or newer is needed, set PYTHON to one"
command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler ('${CXX:-c++}'); install one, for example: apt-get install g++"

stamp=.venv/.installed-$(cat setup.py constraints.txt | sha256sum | cut -c1-16)
say_next() { printf "to use rwkv-clip and deepspeed: source %q\n" "$PWD/.venv/bin/activate"; }
if [ -e "$stamp" ]; then say_next; exit 0; fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    "$python" -m venv .venv || fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

echo "installing into .venv (once; the log is .venv/install.log)"
{
    # PyTorch first and alone: DeepSpeed's own set-up imports it, and its index may differ.
    pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -c constraints.txt torch
    pip install -c constraints.txt setuptools wheel ninja
    DS_BUILD_OPS=0 pip install -c constraints.txt -e '.[dev,eval,prepare]'
} >.venv/install.log 2>&1 || { tail -n 20 .venv/install.log >&2; fail "installation failed; the whole log is .venv/install.log"; }
rm -f .venv/.installed-*
touch "$stamp"
say_next
