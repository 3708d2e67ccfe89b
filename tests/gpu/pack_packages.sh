#!/usr/bin/env bash
# Pack the pinned packages for a GPU machine without registry access, which has its own torch and big libraries.
# Usage: tests/gpu/pack_packages.sh OUT.tgz [PACKAGE ...]      There: tests/gpu/run_checked.sh OUT.tgz [TEST_FILE ...]
# Each PACKAGE comes along as well: `diffusers importlib_metadata` for image models.
# Versions are those of constraints.txt and hide the machine's. PYTHON (default .venv/bin/python) needs torch, to build
# DeepSpeed's wheel; PYTHON_VERSION (default 3.12) is the Python of that machine (x86-64 Linux).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:?OUT.tgz}")
shift
python="${PYTHON:-.venv/bin/python}"
packages=(
  transformers peft accelerate bitsandbytes liger-kernel datasets dill multiprocess hjson tokenizers safetensors
  huggingface_hub hf-xet httpx2 httpcore2 truststore h11 anyio fsspec filelock click typer rich pydantic pydantic_core
  annotated-types typing-inspection typing_extensions gguf sentencepiece xxhash py-cpuinfo pytest pytest-timeout "$@"
)
most_mib=48  # in addition to the checkout; 64 may travel
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/wheels" "$scratch/site"

pinned() {
  grep -i "^${1//_/[-_]}==" constraints.txt || grep -i "^${1//-/[-_]}==" constraints.txt
}
platforms=()
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
requirements=()
for package in "${packages[@]}"; do
  requirements+=("$(pinned "$package")")
done
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$scratch/wheels" "${requirements[@]}"
DS_ACCELERATOR=cpu "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$scratch/wheels" "$(pinned deepspeed)"
for wheel in "$scratch"/wheels/*.whl; do
  "$python" -m zipfile -e "$wheel" "$scratch/site"
done
cd "$scratch/site"
# Of bitsandbytes the CPU and CUDA 13 alone.
rm -f bitsandbytes/libbitsandbytes_{rocm,xpu}*.so bitsandbytes/libbitsandbytes_cuda1[12]*.so
find . -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
tar czf "$out" .
size=$(($(stat -c %s "$out") / 1048576 + 1))
echo "$out: $size MiB, $(find . -maxdepth 1 -name '*.dist-info' | wc -l) packages"
if ((size > most_mib)); then
  echo "more than $most_mib MiB" >&2
  exit 1
fi
