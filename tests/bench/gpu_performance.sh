#!/usr/bin/env bash
# The figures of docs/lab/performance.md on the GPUs of this machine; one short table comes last.
#   tests/bench/gpu_performance.sh figures    1 GPU: bf16 and NF4, without and with recomputation, next to the peers
#   tests/bench/gpu_performance.sh scaling    2 or 4 GPUs: ZeRO-2 against 1 GPU, ZeRO-3 against ZeRO-2
#   tests/bench/gpu_performance.sh profile    1 GPU: the time of a step by category, and the gap to the floor
#   tests/bench/gpu_performance.sh curve      1 GPU: no, selective and full recomputation; AdamW in 32 and 8 bits
# More arguments go to every `zerolora bench`: --steps 10, zero.stage=0, --peer unsloth, ...
# PYTHON (default python3), OUT (results, default runs/performance), SECONDS_LIMIT (default 500) and SHAPE may be set;
# for `figures`, `profile` and `curve` CASES ("bf16 nf4": a part that takes half of the time); for `figures` PEERS, a
# folder with Unsloth's packages (pack_peers.sh), which Unsloth alone sees; for `scaling` GPUS (default all).
# What needs 1 GPU takes all of the machine's: every case has a card of its own, and its trainers follow each other there.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:?figures, scaling, profile or curve}
shift
python=${PYTHON:-python3}
out=${OUT:-runs/performance}
limit=${SECONDS_LIMIT:-500}
if ! PATH=$(dirname "$(command -v "$python")"):$PATH command -v deepspeed > /dev/null; then
  echo "no deepspeed on PATH: zerolora starts its ranks with it" >&2
  exit 2
fi
scratch=$(mktemp -d)
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
# Compiled operators and kernels are shared by all runs of this script.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/triton}
started=$SECONDS
count=$("$python" -c "import torch; print(torch.cuda.device_count())")

finish() {
  # What the runs logged, small enough to be kept: traces and checkpoints of zeros are not.
  (cd "$scratch" && find . -name '*.log' -size -4096k -print0 | tar czf - --null -T -) > "$out/$mode-logs.tgz" || true
  rm -rf "$scratch"
  "$python" -m tests.bench.performance_table "$mode" "$out" || true
  echo "took $((SECONDS - started)) s"
}
trap finish EXIT

# bench NAME ARGUMENTS...: one `zerolora bench`; a failure is shown in its table, and the next one still runs.
bench() {
  local name=$1 left=$((limit - (SECONDS - started)))
  shift
  if ((left < 30)); then
    echo "$name: no time left"
    return
  fi
  echo "== $name"
  timeout --signal=INT --kill-after=20 "$left" "$python" -m benchmarks.bench --shape "${SHAPE:-llama3.1-8b}" \
    --warmup 4 --steps 12 --json "$out/$mode-$name.json" --keep "$scratch/$name" "$@" || echo "$name: exit code $?"
}

# on_cards NAMES CALL...: `bench NAME CALL... NAME` for each, as many at a time as there are cards, one card each.
on_cards() {
  local names=$1 cards at=0
  shift
  # Without a card there is one place, the CPU, which has no number.
  IFS=, read -ra cards <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((count - 1)))}"
  for name in $names; do
    (
      if ((count > 0)); then
        export CUDA_VISIBLE_DEVICES=${cards[at % count]}
      fi
      bench "$name" "$@" --case "$name"
    ) > "$scratch/$name.txt" 2>&1 &
    at=$((at + 1))
    if ((count == 0 || at % count == 0)); then
      wait
    fi
  done
  wait
  for name in $names; do
    cat "$scratch/$name.txt"
  done
}

four="bf16 bf16-recompute-offload nf4 nf4-recompute-offload"
case $mode in
  figures)
    # Unsloth, too, keeps what it recomputes from in host memory; the others cannot.
    on_cards "${CASES:-$four}" --peer unsloth --peer deepspeed --peer peft-liger \
      ${PEERS:+--peer-packages "unsloth=$PEERS"} "$@"
    ;;
  scaling)
    count=${GPUS:-$count}
    if ((count < 2)); then
      echo "scaling: this machine has $count GPU, and 2 are needed at least" >&2
      exit 2
    fi
    bench 1-zero2 --num-gpus 1 --case bf16 --case nf4 "$@"
    bench "$count-zero2" --num-gpus "$count" --case bf16 --case nf4 "$@"
    bench "$count-zero3" --num-gpus "$count" --case bf16 --case nf4 "$@" zero.stage=3
    if ((count > 2)); then
      bench 2-zero2 --num-gpus 2 --case bf16 "$@"
    fi
    bench "$count-deepspeed-zero2" --num-gpus "$count" --no-product --peer deepspeed --case bf16 "$@"
    bench "$count-deepspeed-zero3" --num-gpus "$count" --no-product --peer deepspeed --case bf16 "$@" zero.stage=3
    ;;
  profile)
    on_cards "${CASES:-$four}" --profile "$@"
    ;;
  curve)
    on_cards "${CASES:-bf16 bf16-selective bf16-recompute bf16-recompute-offload}" "$@"
    # Of Llama-3.1-8B's 32 layers: 40 % of the memory by the estimate.
    bench 19-layers --case bf16-recompute-offload "$@" training.gradient_checkpointing_layers=19 ops.recompute=norms
    bench adamw-8bit --case bf16 "$@" training.optimizer=adamw_8bit
    ;;
  *)
    echo "unknown mode $mode: figures, scaling, profile or curve" >&2
    exit 2
    ;;
esac
