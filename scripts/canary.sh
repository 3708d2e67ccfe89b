#!/usr/bin/env bash
# Usage: scripts/canary.sh [pytest arguments]     run the tests on the newest release of every dependency but torch
#
# Uses a separate environment (CANARY, default .venv-canary): installs the pins of constraints.txt, then upgrades them
# past the ranges of pyproject.toml. A failure shows which private use or workaround a new release breaks.
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${CANARY:-.venv-canary}
scripts/setup.sh
python=$VENV/bin/python
index=()
[ -z "${TORCH_INDEX_URL:-}" ] || index=(--extra-index-url "$TORCH_INDEX_URL")
installed_torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
mapfile -t names < <("$python" - << 'NAMES'
import tomllib
from packaging.requirements import Requirement

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = {Requirement(text).name for text in (*project["dependencies"], *extras["dev"])}
print(*sorted(wanted - {"torch"}), sep="\n")
NAMES
)
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$python" -m pip install --disable-pip-version-check -q --no-build-isolation \
  --upgrade --upgrade-strategy eager "${index[@]}" "torch==$installed_torch" "${names[@]}"
echo "newer than constraints.txt:"
"$python" -m pip list --disable-pip-version-check --format=freeze | grep -vixFf constraints.txt | grep -v '^zerolora\|^torch==' || true
PATH="$PWD/$VENV/bin:$PATH"
export PATH
if [ $# -eq 0 ]; then
  set -- -m "not slow" tests/unit/test_known_versions.py tests/unit/test_workarounds.py tests/unit/test_update_guard.py \
    tests/unit/test_loss_scale.py tests/distributed
fi
exec "$python" -m pytest -p no:cacheprovider "$@"
