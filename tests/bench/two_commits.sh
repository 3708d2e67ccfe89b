#!/usr/bin/env bash
# How fast an earlier commit and this tree train, in turn on one card: a line for each run, then the means.
#   tests/bench/two_commits.sh COMMIT            from a checkout with that commit
#   tests/bench/two_commits.sh FOLDER            a tree of that commit, unpacked (`git archive`), where there is no git
# PYTHON (default python3), OUT (default runs/two-commits), SHAPE, CASES ("bf16 nf4"), TURNS (3), STEPS (10) may be set.
# A run takes 25 to 60 s, most of it the start: 3 turns of 2 cases are 12 runs, after a build of both trees.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} new=$PWD out=$(realpath -m "${OUT:-runs/two-commits}") given=${PYTHONPATH:-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
old=$(realpath -m "${1:?a commit, or a folder}")
if [ ! -d "$old" ]; then
  old=$scratch/old
  mkdir "$old"
  git archive "$1" | tar x -C "$old"
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
on_gpu=$("$python" -c "import torch; print(int(torch.cuda.is_available()))")
for tree in old new; do
  if ((on_gpu)); then
    (cd "${!tree}" && PYTHONPATH=${!tree}:$given "$python" -m ops.builder build) > "$out/build-$tree.log" 2>&1 &
  fi
done
wait

one() { # TREE CASE TURN
  (cd "${!1}" && PYTHONPATH=${!1}:$given "$python" -m benchmarks.bench --shape "${SHAPE:-llama3.1-8b}" --warmup 4 \
    --steps "${STEPS:-10}" --case "$2" --json "$out/$1-$2-$3.json") > "$out/$1-$2-$3.log" 2>&1 || echo "$*: exit code $?"
}

for ((turn = 1; turn <= ${TURNS:-3}; ++turn)); do
  for case in ${CASES:-bf16 nf4}; do
    # Which of the two is first changes by turn: a card that warms up must not be taken for a commit.
    if ((turn % 2)); then one old "$case" $turn; one new "$case" $turn; else one new "$case" $turn; one old "$case" $turn; fi
  done
done
"$python" - "$out" << 'END'
import json, statistics, sys
from pathlib import Path

found = {}
for path in sorted(Path(sys.argv[1]).glob("*-*-*.json")):
    tree, case, turn = path.stem.split("-")
    for result in json.loads(path.read_text())["results"]:
        if result["step_ms"]:
            found.setdefault(case, {}).setdefault(tree, []).append(result["median_ms"])
        tokens = result["tokens_per_second_per_gpu"] or 0
        print(f"{tree} {case} {turn}: {tokens:,.0f} tokens/s, peak {result['peak_gib']} GiB {result['error']}")
for case, of in found.items():
    if len(of) == 2:
        old, new = (statistics.mean(of[tree]) for tree in ("old", "new"))
        print(f"{case}: {old:.1f} ms before, {new:.1f} ms after, {100 * (new / old - 1):+.2f} %")
END
