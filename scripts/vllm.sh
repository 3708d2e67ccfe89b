#!/usr/bin/env bash
# Usage: scripts/vllm.sh     install vLLM for CPUs in a separate environment, and print its folder
#
# ZEROLORA_VLLM     the folder (default ~/.cache/zerolora/vllm); reused until the list of packages changes
# PYTHON            the interpreter to use (default python3)
# TORCH_INDEX_URL   a wheel index for torch, if the configured one lacks the CPU build
#
# The folder lib/transformers4 holds transformers 4, for the tokenizers of older servers.
# vLLM requires another transformers than zerolora, and packages that no test uses: so install a list of exact versions
# without dependencies. Takes about two minutes and 3 GB.
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
