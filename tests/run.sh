#!/usr/bin/env bash
# Install what the tests need, then run them all. Arguments go to pytest: `bash tests/run.sh tests/model -k golden`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
export PATH="$PWD/.venv/bin:$PATH"
exec .venv/bin/python -m pytest "$@"
