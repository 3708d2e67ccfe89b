#!/usr/bin/env bash
# All six tiers on the first GPU, or those named: tests/gpu/run_tiers.sh [NAME|all] [options of `zerolora tier`]
# The exit code is that of `zerolora tier`: 0 all held, 1 something broke, 2 usage.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Without a network nothing is waited for: what is not on this machine is random, and the tier says so.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" PIP_RETRIES="${PIP_RETRIES:-0}" PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-10}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
# Compiled before the clock of the first tier starts; the tier reports a failed build.
if command -v nvidia-smi >/dev/null; then "$python" -m ops.builder build || true; fi
exec "$python" -m launcher.cli tier "${1:-all}" --check-vram "${@:2}"
