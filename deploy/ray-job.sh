#!/usr/bin/env bash
# A job on one node of a Ray cluster whose nodes have zerolora installed, and CONFIG and runs on a disk that all see:
#   deploy/ray-job.sh CONFIG [key=value ...]
# GPUS (default 8) and RAY_ADDRESS may be set. Submit it again to resume.
set -euo pipefail
config=$(realpath "${1:?CONFIG}")
shift
exec ray job submit --entrypoint-num-gpus "${GPUS:-8}" --entrypoint-num-cpus 1 -- \
  zerolora train "$config" --num-gpus "${GPUS:-8}" training.resume_from_checkpoint=auto "$@"
