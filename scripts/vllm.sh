#!/usr/bin/env bash
# Usage: scripts/vllm.sh     installs vLLM for CPUs in an environment of its own; prints the environment's folder
#
# ZEROLORA_VLLM     the folder (default ~/.cache/zerolora/vllm); reused as long as what is installed in it does not change
# PYTHON            the interpreter it is made with (default python3)
# TORCH_INDEX_URL   a wheel index to take torch from, where the configured one does not have the CPU build
#
# In the folder lib/transformers4 lies transformers 4, whose tokenizers older servers use.
# vLLM requires another transformers than zerolora, torchvision and more for what no test uses: hence a list of exact
# versions, installed without their dependencies. About two minutes and 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=${ZEROLORA_VLLM:-${XDG_CACHE_HOME:-$HOME/.cache}/zerolora/vllm}
STAMP=$FOLDER/.complete
wanted=$(cat scripts/vllm.sh scripts/vllm-requirements.txt | sha256sum)

mkdir -p "$(dirname "$FOLDER")"
if command -v flock >/dev/null; then exec 9>"$FOLDER.lock"; flock 9; fi
if [ "$(cat "$STAMP" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$FOLDER"
    "${PYTHON:-python3}" -m venv "$FOLDER"
    index=()
    [ -z "${TORCH_INDEX_URL:-}" ] || index=(--extra-index-url "$TORCH_INDEX_URL")
    pip_install() { "$FOLDER/bin/python" -m pip install --disable-pip-version-check -qq --no-compile "$@" >&2; }
    pip_install --no-deps "${index[@]}" -r scripts/vllm-requirements.txt
    pip_install --no-deps --target "$FOLDER/lib/transformers4" \
        transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.0
    echo "$wanted" >"$STAMP"
fi
echo "$FOLDER"
