#!/usr/bin/env bash
# Usage: scripts/nvcc.sh
# CUDA's compiler, so that tests/numerics/test_kernels_compile.py has one: nothing to do where nvcc is on the PATH, else its
# wheels are installed in a folder of their own, for an environment without a GPU is to stay without CUDA.
#
# VENV              the environment whose pip is used (default .venv)
# ZEROLORA_CI_CACHE where the compiler and the record of what has compiled are kept (default ~/.cache/zerolora-ci)
set -euo pipefail
cd "$(dirname "$0")/.."
! command -v nvcc >/dev/null || exit 0

# nvcc finds its parts by its own place: all are of one version and lie in one folder.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85
    nvidia-cuda-runtime==13.0.96)
cache=${ZEROLORA_CI_CACHE:-$HOME/.cache/zerolora-ci}
[ ! -x "$cache/nvcc/nvidia/cu13/bin/nvcc" ] || exit 0
mkdir -p "$cache"
rm -rf "$cache/nvcc.new"
"${VENV:-.venv}/bin/python" -m pip install --disable-pip-version-check -qq --no-deps --only-binary :all: \
    --target "$cache/nvcc.new" "${wheels[@]}"
mv "$cache/nvcc.new" "$cache/nvcc"
