#!/usr/bin/env bash
# Usage: scripts/nvcc.sh
# Provide CUDA's compiler for tests/numerics/test_kernels_compile.py. Does nothing if nvcc is on the PATH; else installs its
# wheels in a separate folder, because an environment without a GPU should stay without CUDA.
#
# VENV              the environment that provides pip (default .venv)
# ZEROLORA_CI_CACHE folder of the compiler and the record of what has compiled (default ~/.cache/zerolora-ci)
set -euo pipefail
cd "$(dirname "$0")/.."
! command -v nvcc >/dev/null || exit 0

# nvcc finds its parts relative to itself: all must have one version and be in one folder.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85
    nvidia-cuda-runtime==13.0.96)
cache=${ZEROLORA_CI_CACHE:-$HOME/.cache/zerolora-ci}
[ ! -x "$cache/nvcc/nvidia/cu13/bin/nvcc" ] || exit 0
mkdir -p "$cache"
rm -rf "$cache/nvcc.new"
"${VENV:-.venv}/bin/python" -m pip install --disable-pip-version-check -qq --no-deps --only-binary :all: \
    --target "$cache/nvcc.new" "${wheels[@]}"
mv "$cache/nvcc.new" "$cache/nvcc"
