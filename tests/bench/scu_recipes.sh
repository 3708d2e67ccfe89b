#!/usr/bin/env bash
# The recipes of `zerolora scu-train` on a larger card instead of theirs: peak, tokens a second, the estimate.
#   tests/bench/scu_recipes.sh [MODEL]        default random:granite-4.0-h-1b; about a minute each on an H200
# PYTHON (default python3), OUT (default runs/scu-recipes), RECIPES (names; default all) and STEPS (default 6; the first
# two are not counted) may be set. What training.memory_fraction leaves out of a card is CUDA's context, 0.75 GiB.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} model=${1:-random:granite-4.0-h-1b} steps=${STEPS:-6} names=${RECIPES:-rtx3080 rtx4090 a100 h100 defaults-fp16}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
out=$(mkdir -p "${OUT:-runs/scu-recipes}" && cd "${OUT:-runs/scu-recipes}" && pwd)
total=$("$python" -c "import torch; print(torch.cuda.mem_get_info()[1] / 2**30)") || exit 2
cd "$out"
"$python" - << 'P'
import json, random, string
draw = random.Random(0)
word = lambda: "".join(draw.choices(string.ascii_lowercase, k=5))
with open("long.jsonl", "w") as file:
    file.writelines(json.dumps({"text": " ".join(word() for _ in range(6000))}) + "\n" for _ in range(12))
P

recipe() { # NAME, GiB of its card, flags
  local name=$1 gib=$2 fraction
  shift 2
  [[ " $names " == *" $name "* ]] || return 0
  fraction=$("$python" -c "print(round(min(1.0, ($gib - 0.75) / $total), 4))")
  timeout 240 "$python" -m launcher.cli scu-train "$@" --model "$model" --data long.jsonl --target-s 0.000001 \
    --max-steps "$steps" --output-dir "$name" --memory-fraction "$fraction" dataset.val_split=0 \
    dataset.cache_dir="$out/datasets" output.overwrite=delete > "$name.txt" 2>&1
  echo "$name: exit $?"
}
recipe rtx3080 10 --card rtx3080
recipe rtx4090 24 --card rtx4090
recipe a100 40 --card a100
recipe h100 80 --card h100
recipe defaults-fp16 24 --fp16
"$python" - $names << 'P'
import json, statistics, sys
for name in sys.argv[1:]:
    try:
        lines = map(json.loads, open(f"{name}/metrics.jsonl"))
        steps = [record for record in lines if "perf/step_ms" in record][2:]
        memory = json.load(open(f"{name}/run.json"))["memory"]
    except OSError:
        print(f"{name:14} failed: {open(name + '.txt').read().splitlines()[-1]}")
        continue
    speed = statistics.median(record["perf/tokens_per_second"] for record in steps)
    peak, predicted = memory["measured_bytes"] / 2**30, memory["predicted"]["peak_bytes"] / 2**30
    print(f"{name:14} {speed:9,.0f} tokens/s  peak {peak:6.2f} GiB  predicted {predicted:6.2f}")
P
