#!/usr/bin/env bash
# Usage: scripts/setup.sh                  create or update the virtual environment; returns at once if it is up to date
#        scripts/setup.sh --report FILE    install nothing; write pip's dry-run report of everything to install
#
# VENV              the environment's folder (default .venv)
# PYTHON            the interpreter to use (default: the first of python3, python3.12, python3.11 that is new enough)
# ACCELERATOR       cuda or cpu (default: cuda with an NVIDIA driver)
# EXTRAS            optional dependencies of pyproject.toml (default: dev; dev,gpu with cuda)
# TORCH_INDEX_URL   a wheel index for torch, if the configured one lacks the build for this machine
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STAMP=$VENV/.zerolora-setup

say() { echo "set-up: $*" >&2; }
die() { say "$*"; exit 1; }

if [ -z "${ACCELERATOR:-}" ]; then
    ACCELERATOR=cpu
    if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then ACCELERATOR=cuda; fi
fi
case $ACCELERATOR in
    cpu) EXTRAS=${EXTRAS-dev} ;;
    cuda) EXTRAS=${EXTRAS-dev,gpu} ;;
    *) die "ACCELERATOR=$ACCELERATOR: must be cuda or cpu" ;;
esac

# pip gets the index in both steps (torch alone, then the rest), so that the second step keeps the torch of the first: a
# local version such as 2.13.0+cpu counts as newer than 2.13.0.
index=()
[ -z "${TORCH_INDEX_URL:-}" ] || index=(--extra-index-url "$TORCH_INDEX_URL")
pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check -qq -c constraints.txt "$@"; }
torch=$(grep '^torch==' constraints.txt)
# DeepSpeed is a source distribution that imports torch during its build, so build isolation is off. No operator is compiled
# here, and `cpu` stops the build from looking for a CUDA toolkit; the accelerator is chosen at import.
export DS_ACCELERATOR=cpu DS_BUILD_OPS=0
everything=(--no-build-isolation "${index[@]}" "$torch" -e ".[$EXTRAS]")

if [ "${1:-}" = --report ]; then
    pip_install --dry-run --ignore-installed --report "$2" "${everything[@]}"
    exit
fi

wanted="$PWD $ACCELERATOR $EXTRAS ${TORCH_INDEX_URL:-} $(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum)"
up_to_date() { [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; }
up_to_date && exit

# Of two concurrent runs the second waits, then finds the work done.
if command -v flock >/dev/null; then exec 9<scripts/setup.sh; flock 9; up_to_date && exit; fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3.12 make"
}

if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || scripts/system.sh python3-venv
    say "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
fi
# DeepSpeed compiles small C++ operators at start, which needs a compiler and Python's headers.
command -v c++ >/dev/null || scripts/system.sh g++
"$VENV/bin/python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    scripts/system.sh python3-dev

if [ "$ACCELERATOR" = cpu ] && [ ${#index[@]} -eq 0 ]; then
    report=$(mktemp)
    trap 'rm -f "$report"' EXIT
    pip_install --dry-run --ignore-installed --report "$report" "$torch"
    if grep -Eq '"name": *"nvidia[-_]' "$report"; then
        die "no NVIDIA driver was found, and the configured package index offers only the CUDA build of $torch;" \
            "set TORCH_INDEX_URL to PyTorch's wheel index for the CPU"
    fi
fi

pip_install pip setuptools wheel
say "installing $torch"
pip_install "${index[@]}" "$torch" numpy packaging ninja
say "installing zerolora[$EXTRAS] and its dependencies"
pip_install "${everything[@]}"
echo "$wanted" >"$STAMP"
say "done in $VENV"
