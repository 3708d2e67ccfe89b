#!/usr/bin/env bash
# Measurements of 8-bit bases on one GPU; tables are printed last, files are in $OUT.
#   tests/bench/eight_bit.sh parts      the operators against float64; the times of their parts (about 120 s)
#   tests/bench/eight_bit.sh speed      zerolora bench: bf16, fp8, int8, with the time by category (about 200 s)
#   tests/bench/eight_bit.sh quality    SmolLM2, 300 steps, three seeds each of bf16, fp8, int8, NF4 and two checkpoints that
#                                       are stored in FP8: by blocks, and by rows with 8-bit products (about 200 s)
# PYTHON (default python3), OUT (default runs/eight-bit) and GGUF (default /tmp/smollm2.gguf) may be set.
set -uo pipefail
cd "$(dirname "$0")/../.."
mode=${1:?parts, speed or quality}
python=${PYTHON:-python3}
out=${OUT:-runs/eight-bit}
scratch=$(mktemp -d)
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
unset DS_ACCELERATOR
timeout 150 "$python" -m ops.builder build > "$out/build.log" 2>&1
echo "operators: exit $? after $SECONDS s"

case $mode in
parts)
  timeout 90 "$python" -m pytest -p no:cacheprovider -q -rA -m gpu tests/gpu/test_ops_eight_bit.py > "$out/tests.log" 2>&1
  echo "tests: exit $? after $SECONDS s"
  timeout 60 "$python" -m tests.bench.bench_eight_bit > "$out/parts.log" 2>&1
  echo "parts: exit $? after $SECONDS s"
  grep -E "^(FAILED|ERROR)|depth [0-9]+" "$out/tests.log"
  tail -1 "$out/tests.log"
  tail -6 "$out/parts.log"
  ;;
speed)
  timeout --signal=INT 300 "$python" -m launcher.cli bench --case bf16 --case fp8 --case int8 --steps 6 --warmup 3 \
    --profile --json "$out/bench.json" --keep "$scratch/bench" > "$out/bench.log" 2>&1
  echo "bench: exit $? after $SECONDS s"
  tail -60 "$out/bench.log"
  ;;
quality)
  DS_ACCELERATOR=cpu "$python" -m tests.bench.scu_texts "$scratch" "${GGUF:-/tmp/smollm2.gguf}" > "$out/texts.log" 2>&1 ||
    { tail -5 "$out/texts.log"; exit 1; }
  echo "texts and model after $SECONDS s"
  common=(base_model="$scratch/model" dataset.path="$scratch/stdlib/train.jsonl"
    dataset.evaluation.path="$scratch/stdlib/eval.jsonl" dataset.cache_dir="$scratch/cache"
    dataset.evaluation.max_samples=200 training.batch_size=8 training.max_steps=300 training.eval_steps=300
    training.save_steps=0 training.precision=bf16 logging.sample_prompts=[])
  # The first prepares the data, which the others find.
  "$python" -m launcher.cli validate configs/demo.yaml "${common[@]}" output_dir="$scratch/none" > "$out/validate.log" 2>&1
  DS_ACCELERATOR=cpu "$python" - "$scratch" << 'STORE'
import shutil, sys
from pathlib import Path
from tests.eight_bits import store_in_fp8
for form, block in (("blocks", 128), ("channel", 1)):
    folder = Path(shutil.copytree(f"{sys.argv[1]}/model", f"{sys.argv[1]}/{form}"))
    store_in_fp8(folder, form, block=block)
STORE
  for seed in 1 2 3; do
    for kind in bf16 fp8 int8 nf4 blocks channel; do
      settings=(adapter=qlora quantization.quant_type="$kind")
      [[ $kind == bf16 ]] && settings=(adapter=lora)
      [[ $kind == blocks ]] && settings=(adapter=lora base_model="$scratch/blocks")
      [[ $kind == channel ]] && settings=(adapter=qlora quantization.quant_type=fp8 base_model="$scratch/channel")
      timeout 300 "$python" -m launcher.cli train configs/demo.yaml "${common[@]}" "${settings[@]}" seed="$seed" \
        output_dir="$scratch/runs/$kind-$seed" > "$out/$kind-$seed.log" 2>&1 &
    done
  done
  wait
  for run in "$scratch"/runs/*; do cp "$run/metrics.jsonl" "$out/$(basename "$run").jsonl"; done
  echo "runs after $SECONDS s"
  "$python" -m tests.bench.eight_bit_quality "$out"
  ;;
*) echo "$mode: parts, speed or quality" && exit 2 ;;
esac
rm -rf "$scratch"
