#!/usr/bin/env bash
# Pack Axolotl and what it needs for a GPU machine without registry access: a folder of its own, for its process alone.
# torch (2.11 to 2.13), triton, numpy, scipy, scikit-learn, pandas, pyarrow, numba, regex, safetensors, sentencepiece,
# psutil, aiohttp, httpx, requests, rich, typer, xxhash and what these need come from the machine.
# Usage: tests/bench/pack_axolotl.sh OUT.txz
# There: mkdir /tmp/axolotl; tar xJf OUT.txz -C /tmp/axolotl
#        zerolora bench --peer axolotl --peer-packages axolotl=/tmp/axolotl
# PYTHON_VERSION (default 3.12) is the Python of that machine (x86-64 Linux).
#
# Versions are Axolotl 0.19.0's own pins and what pip resolves with them for torch 2.11. Left out is what
# benchmarks/bench/axolotl.py imports nothing of: gradio, modal, trackio, optimum, lm_eval, mistral-common, openenv, xformers,
# flash-linear-attention, the storage of four clouds and what they need, about 180 packages. wandb must import but sends
# nothing: its programs are cut, and with them four fifths of it.
set -euo pipefail
out=$(realpath -m "${1:?OUT.txz}")
requirements=(
  axolotl==0.19.0 transformers==5.16.1 tokenizers==0.23.1 huggingface_hub==1.17.0 peft==0.20.0 accelerate==1.13.0
  datasets==4.8.4 fsspec==2025.10.0 dill==0.4.1 multiprocess==0.70.19 trl==1.9.0 evaluate==0.4.1
  bitsandbytes==0.50.2 torchao==0.17.0 liger-kernel==0.8.1 kernels==0.16.2 kernels-data==0.16.2
  pydantic==2.12.5 pydantic_core==2.41.5 annotated-types==0.8.0 typing-inspection==0.4.5 typing_extensions==4.15.0
  addict==2.4.0 fastcore==2.2.39 python-dotenv==1.0.1 posthog==6.7.11 backoff==2.2.1 distro==1.9.0
  wandb==0.31.0 platformdirs==4.14.8 protobuf==6.33.6 googleapis-common-protos==1.76.0
  opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-proto==1.45.2
  opentelemetry-semantic-conventions==0.66b2 opentelemetry-exporter-http-transport==0.66b2
  opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2
  opentelemetry-exporter-otlp-proto-http==1.45.2
)
from_source=(axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6)  # plain Python
most_mib=54
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/wheels" "$scratch/site"

platforms=()
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$scratch/wheels" "${requirements[@]}"
python3 -m pip wheel -q --no-deps -w "$scratch/wheels" "${from_source[@]}"
for wheel in "$scratch"/wheels/*.whl; do
  python3 -m zipfile -e "$wheel" "$scratch/site"
done

cd "$scratch/site"
# Of bitsandbytes the CPU and CUDA 13 alone.
rm -f bitsandbytes/libbitsandbytes_{rocm,xpu}*.so bitsandbytes/libbitsandbytes_cuda1[12]*.so
rm -rf wandb/bin test package_readme.md ./*.data
find . -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
# This folder comes first on the path, where these would hide the machine's.
for name in torch torchvision triton numpy nvidia; do
  if [[ -e $name ]]; then
    echo "$name must come from the machine" >&2
    exit 1
  fi
done
tar c . | xz -9 >"$out"
size=$(($(stat -c %s "$out") / 1048576 + 1))
echo "$out: $size MiB, $(find . -maxdepth 1 -name '*.dist-info' | wc -l) packages"
if ((size > most_mib)); then
  echo "more than $most_mib MiB: of the 64 that may travel, the checkout needs some" >&2
  exit 1
fi
