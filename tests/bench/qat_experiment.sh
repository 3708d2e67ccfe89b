#!/usr/bin/env bash
# SmolLM2-135M, three seeds: trained for int8 and int4 (training.qat) versus a plain run that is rounded afterwards; the
# held-out loss of the merged models as transformers loads them is printed last. Seeds run side by side.
#   OUT=runs/qat STEPS=300 SEEDS="1 2 3" KINDS="plain int8 int4" DOCUMENTS=224 tests/bench/qat_experiment.sh [key=value ...]
# PYTHON (default python3) and MODEL_AND_DATA (what `python -m examples.demo` prints) may be set. Further settings go to
# every run. `pip install torchao compressed-tensors` first.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-runs/qat}
read -ra common <<< "${MODEL_AND_DATA:-$("$python" -m examples.demo | tail -1)}"
common+=(training.max_steps="${STEPS:-300}" training.save_steps=0 dataset.evaluation.max_samples="${DOCUMENTS:-224}"
  logging.sample_prompts=[] output.overwrite=true "$@")
mkdir -p "$out"
one_seed() {
  local seed=$1 kind setting run form
  for kind in ${KINDS:-plain int8 int4}; do
    setting=(training.qat="$kind")
    [[ $kind == plain ]] && setting=()
    run=$out/$kind-$seed
    "$python" -m launcher.cli train configs/demo.yaml "${common[@]}" "${setting[@]}" seed="$seed" output_dir="$run" \
      > "$run.log" 2>&1 || { tail -5 "$run.log"; exit 1; }
    tail -4 "$run.log" | grep held-out || true
  done
  "$python" -m launcher.cli merge "$out/plain-$seed" --dtype fp32
  for form in int8 int4; do
    [[ -d $out/$form-$seed ]] || continue
    "$python" -m launcher.cli merge "$out/plain-$seed" --quantize $form
    "$python" -m launcher.cli merge "$out/$form-$seed" --quantize $form
  done
}
# Side by side: small models leave most of a card idle.
ends=()
for seed in ${SEEDS:-1 2 3}; do
  one_seed "$seed" &
  ends+=($!)
done
for end in "${ends[@]}"; do wait "$end"; done
"$python" -m tests.bench.qat_quality "$out"
