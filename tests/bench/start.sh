#!/usr/bin/env bash
# Starts before and after a change on one GPU: SmolLM2's shape, then 8B with random weights.
#
#     tests/bench/start.sh OLD_CHECKOUT OUT       about 200 s; the first run builds the operators for all
set -uo pipefail
unset DS_ACCELERATOR
python=${PYTHON:-python3}; old=$(realpath "$1"); out=$2; limit=${LIMIT:-200}
mkdir -p "$out"
one() {  # NAME MOST ARGUMENTS...
  local name=$1 most=$2 left=$((limit - SECONDS)); shift 2
  ((left < 15)) && { echo "no time left for $name"; return; }
  timeout --kill-after=5 $((left < most ? left : most)) "$python" -m tests.bench.start --length 512 "$@" \
    > "$out/$name.log" 2>&1
  echo "$name: exit $? after $SECONDS s"; head -5 "$out/$name.log"
}
one new-smollm2 110 --runs 2 --profile --functions
one old-smollm2 45 --runs 0 --tree "$old"
one new-8b 60 --shape llama3.1-8b --runs 0 --profile
one old-8b 70 --shape llama3.1-8b --runs 0 --tree "$old"
