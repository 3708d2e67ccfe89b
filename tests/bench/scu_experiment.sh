#!/usr/bin/env bash
# The experiments of docs/lab/scu.md on the GPUs of a machine, with SmolLM2's real weights.
#   tests/bench/scu_experiment.sh trial     two runs side by side: does it work, how fast is a step
#   tests/bench/scu_experiment.sh hold SEEDS      384 records: every controller; 64 records of another text
#   tests/bench/scu_experiment.sh ramps SEEDS     384 records: linear and cosine to 4, PI under a floor of the rate
#   tests/bench/scu_experiment.sh kl SEEDS        forgetting: kl at three targets, none, the norm term, three rates
# Runs are written as they end, seed after seed: what a limit cuts off leaves whole seeds. What every run measured comes
# back in $OUT/scu-MODE-SEEDS.tgz; unpacked into one folder, several calls' runs are one experiment (scu_figures.py).
# PYTHON (default python3), OUT (default runs/scu), GGUF (default /tmp/smollm2.gguf), SECONDS_LIMIT (500), GPUS (all),
# PARALLEL (runs side by side on each GPU, 9), WORK (a folder that stays: the same command resumes there), TEXTS (a folder of
# scu_texts.py, made elsewhere) and MORE ("key=value ..." for every run) may be set.
set -uo pipefail
cd "$(dirname "$0")/../.."
mode=${1:?trial, hold, ramps or kl}
seeds=${2:-1,2,3}
python=${PYTHON:-python3}
out=${OUT:-runs/scu}
limit=${SECONDS_LIMIT:-500}
parallel=${PARALLEL:-9}
scratch=${WORK:-$(mktemp -d)}
IFS=, read -ra gpus <<< "${GPUS:-$("$python" -c 'import torch; print(",".join(map(str, range(torch.cuda.device_count()))))')}"
mkdir -p "$out" "$scratch"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export TRITON_CACHE_DIR=$scratch/triton
export PYTHONPATH="$PWD:${PYTHONPATH:-}"

finish() {
  (cd "$scratch/runs" 2> /dev/null && find . \( -name heldout_documents.json -o -name 'scu_*.json' -o -name console.log \
    -o -name training_config.json -o -name 'compare.*' \) -print0 |
    tar czf "$out/scu-$mode-${seeds//,/}.tgz" --null -T -)
  find "$scratch/runs" -name heldout_documents.json 2> /dev/null | wc -l | sed 's/$/ runs finished/'
  echo "took $SECONDS s"
}
trap finish EXIT

[[ -n ${TEXTS:-} ]] && cp -r "$TEXTS"/. "$scratch"
"$python" -m ops.builder build > "$out/build.log" 2>&1 &
DS_ACCELERATOR=cpu "$python" -m tests.bench.scu_texts "$scratch" "${GGUF:-/tmp/smollm2.gguf}" > "$out/texts.log" 2>&1 ||
  { tail -5 "$out/texts.log"; exit 1; }
echo "texts and model after $SECONDS s"
wait
echo "operators after $SECONDS s"

# compare NAME SEED SEEDS OPTIONS...: runs of SEEDS seeds from SEED on, as long as there is time; `slots` of them at a time
# on each of the GPUs that `cards` names
compare() {
  local name=$1 seed=$2 seeds=$3 left=$((limit - SECONDS))
  shift 3
  ((left < 60)) && { echo "no time left for $name, seed $seed"; return; }
  timeout -s TERM -k 20 "$left" "$python" -m benchmarks.compare configs/compare-smollm2.yaml base_model="$scratch/model" \
    seed="$seed" --seeds "$seeds" --output "$scratch/runs/$name" --parallel "$slots" \
    ${all:+--gpus "${cards:-$all}"} --forgetting "$scratch/prose/unseen.jsonl" dataset.cache_dir="$scratch/cache" "$@" \
    ${MORE:-} > "$out/$name-$seed.log" 2>&1
  echo "$name, seed $seed: exit code $? after $SECONDS s"
  grep -E "FAILED|error" "$out/$name-$seed.log" | head -5
}

all=$(IFS=,; echo "${gpus[*]}")
first=${seeds%%,*}
count=$(tr ',' '\n' <<< "$seeds" | wc -l)
slots=$((parallel * (${#gpus[@]} > 1 ? ${#gpus[@]} : 1)))
stdlib=(dataset.path="$scratch/stdlib/train.jsonl" dataset.evaluation.path="$scratch/stdlib/eval.jsonl")
# 64 records, seen 50 times in 200 steps
torch=(dataset.path="$scratch/torch/train.jsonl" dataset.evaluation.path="$scratch/torch/eval.jsonl"
  dataset.max_samples=64 training.max_steps=200 training.eval_steps=10)
# With sigma 0.03 a lambda acts as a hundred times that lambda with the sigma of 0.3 of the first experiment.
lambdas=0.03,0.1,0.3,1,3,10,30
targets=0.01,0.02,0.04

case $mode in
  trial)
    compare trial 1 1 "${stdlib[@]}" --controllers fixed,pi --lambdas 3 --targets 0.02
    cut -c1-150 "$out/trial-1.log" | tail -40
    for run in "$scratch"/runs/trial/*/; do
      echo "$run"
      "$python" - "$run" << 'CURVE'
import json, sys, statistics
folder = sys.argv[1]
records = json.load(open(folder + "scu_metrics.json"))
print([(r["step"], round(r["s_smoothed"], 5), round(r["lambda"], 2), round(r["data_bpt"], 3)) for r in records[9::30]])
lines = [json.loads(line) for line in open(folder + "metrics.jsonl")]
print([(l["step"], round(l["eval/bpt"], 3)) for l in lines if "eval/bpt" in l])
print("step ms", statistics.median(l["perf/step_ms"] for l in lines if "perf/step_ms" in l))
CURVE
    done
    ;;
  hold)
    # Both texts in one pool of processes.
    slots=$((slots * 3 / 4)) compare stdlib "$first" "$count" "${stdlib[@]}" training.eval_steps=30 \
      --controllers none,fixed,linear,cosine,pi --lambdas $lambdas --ramps 3 --targets $targets &
    slots=$((slots / 4)) compare torch "$first" "$count" "${torch[@]}" --controllers none,fixed,pi --lambdas $lambdas \
      --targets $targets &
    wait
    tail -n 75 "$out/stdlib-$first.log" | cut -c1-130
    tail -n 60 "$out/torch-$first.log" | cut -c1-130
    ;;
  ramps)
    compare ramps "$first" "$count" "${stdlib[@]}" training.eval_steps=50 --controllers linear,cosine --ramps 4
    ;;
  kl)
    # Six comparisons at once, each on one of the GPUs, so that the slowest runs of one do not leave a GPU idle.
    reference=(scu.measure=kl scu.reference="$scratch/prose/reference.jsonl")
    slots=$((slots < 6 ? 1 : slots / 6)) at=0 slices=$((${#gpus[@]} > 1 ? ${#gpus[@]} : 1))
    for rate in 1e-3 5e-4 2e-3; do
      more=("${stdlib[@]}" training.learning_rate=$rate training.eval_steps=50)
      cards=${gpus[at % slices]:-} compare "kl-$rate" "$first" "$count" "${more[@]}" "${reference[@]}" --measures kl \
        --controllers none,pi --targets 0.02,0.05,0.1 &
      at=$((at + 1))
      cards=${gpus[at % slices]:-} compare "norm-$rate" "$first" "$count" "${more[@]}" --controllers fixed \
        --lambdas 0.5,1,2,4 &
      at=$((at + 1))
    done
    wait
    ;;
esac
