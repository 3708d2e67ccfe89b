#!/usr/bin/env bash
# GPU tests with the pinned transformers, peft, deepspeed and bitsandbytes carried along; torch as the machine has it.
# Usage: tests/gpu/run_checked.sh SITE.tgz [TEST_FILE ...]      SITE.tgz: tests/gpu/pack_packages.sh; a table comes last
# PYTHON (default python3), OUT (logs and junit files, default runs/gpu) and SECONDS_LIMIT (default 540) may be set.
set -euo pipefail
cd "$(dirname "$0")/../.."
site=${1:?SITE.tgz}
shift
files=("$@")
if ((${#files[@]} == 0)); then
  files=(tests/unit/test_update_guard.py tests/gpu/test_training.py tests/gpu/test_memory_afresh.py)
fi
# shellcheck source=tests/bench/unpack_packages.sh
. tests/bench/unpack_packages.sh "$site"
python=${PYTHON:-python3}
out=${OUT:-runs/gpu}
limit=${SECONDS_LIMIT:-540}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$PWD:$PYTHONPATH"
unset DS_ACCELERATOR

"$python" - << 'VERSIONS'
import importlib.util, torch
from trainer.contract.known_versions import TESTED_VERSIONS, get_release, build_version_warning

print("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch", torch.__version__)
for library in TESTED_VERSIONS:
    spec = importlib.util.find_spec(library.replace("-kernel", "_kernel"))
    print(f"{library:<14} {get_release(library)}  {spec.submodule_search_locations[0] if spec else '-'}")
print(build_version_warning() or "all of them are tested versions")
VERSIONS
# Compiled once, before any test's time limit runs.
"$python" -m ops.builder build > "$out/build.log" 2>&1 || tail -5 "$out/build.log"
echo "operators built after $SECONDS s"

for file in "${files[@]}"; do
  left=$((limit - SECONDS))
  name=$(basename "$file" .py)
  if ((left < 20)); then
    echo "$file: no time left"
    continue
  fi
  echo "== $file"
  timeout --signal=INT --kill-after=20 "$left" "$python" -m pytest -p no:cacheprovider -q -m gpu --timeout "$left" \
    --junitxml "$out/$name.xml" "$file" > "$out/$name.log" 2>&1 || tail -40 "$out/$name.log"
done

"$python" - "$out" "${files[@]}" << 'TABLE'
import sys
from pathlib import Path
from xml.etree import ElementTree

out, failed = Path(sys.argv[1]), []
print(f"\n{'file':<42} passed failed skipped seconds")
for file in sys.argv[2:]:
    report = out / f"{Path(file).stem}.xml"
    if not report.exists():
        print(f"{file:<42} did not end")
        failed.append(file)
        continue
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    print(f"{file:<42} {len(cases) - len(bad) - len(skipped):6} {len(bad):6} {len(skipped):7} {seconds:7.0f}")
    failed += [f"{file}::{case.get('name')}" for case in bad]
print(*(f"FAILED {name}" for name in failed), sep="\n")
sys.exit(1 if failed else 0)
TABLE
