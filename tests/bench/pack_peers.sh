#!/usr/bin/env bash
# Pack Unsloth and what it needs for a GPU machine without registry access: a folder of its own, for its process alone.
# Unsloth wants datasets < 5, zerolora datasets >= 5.2: only gpu_performance.sh puts this folder on PYTHONPATH, and only
# for Unsloth. torch, triton, transformers, accelerate and the rest come from the machine; peft, bitsandbytes, dill,
# multiprocess and pydantic from the archive that zerolora itself needs there.
# Usage: tests/bench/pack_peers.sh OUT.tgz      There: mkdir /tmp/peers; tar xzf OUT.tgz -C /tmp/peers; PEERS=/tmp/peers
# PYTHON_VERSION (default 3.12) is the Python of that machine (x86-64 Linux).
#
# Left out of what Unsloth 2026.10.9 declares:
#   xformers                          0.0.35, the newest, is linked against libcudart.so.12: it does not load with a torch
#                                     for CUDA 13, and Unsloth then takes torch's SDPA, as it does where there is none
#   diffusers, hf_transfer            nothing that trains a language model imports the one, nothing offline the other
#   json5, nest-asyncio, structlog    for Unsloth's own command line and web pages, which are cut from its wheel as well
set -euo pipefail
out=$(realpath -m "${1:?OUT.tgz}")
requirements=(
  unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 datasets==4.8.5 torchao==0.18.0 cut_cross_entropy==25.1.1
  msgspec==0.22.0 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0
)
most_mib=20
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/wheels" "$scratch/peers"

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
for requirement in "${requirements[@]}"; do
  python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$scratch/wheels" "$requirement"
done
for wheel in "$scratch"/wheels/*.whl; do
  python3 -m zipfile -e "$wheel" "$scratch/peers"
done

cd "$scratch/peers"
rm -rf studio unsloth_cli ./*.data
find . -type d \( -name tests -o -name test -o -name docs -o -name __pycache__ \) -prune -exec rm -rf {} +
# This folder comes first on the path, where these would hide the machine's.
for name in torch torchvision transformers triton peft accelerate bitsandbytes numpy; do
  if [[ -e $name ]]; then
    echo "$name must come from the machine" >&2
    exit 1
  fi
done
tar czf "$out" .
size=$(($(stat -c %s "$out") / 1048576 + 1))
echo "$out: $size MiB, $(find . -name '*.dist-info' | wc -l) packages"
if ((size > most_mib)); then
  echo "more than $most_mib MiB: it has to travel with the checkout and zerolora's own packages" >&2
  exit 1
fi
