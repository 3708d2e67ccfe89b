#!/usr/bin/env bash
# A job of Hugging Face on 8 H200s. IMAGE is that of the Dockerfile in a public registry; CONFIG lies in the bucket:
#   IMAGE=... BUCKET=me/my-bucket deploy/hf-job.sh CONFIG [key=value ...]
# FLAVOR (default h200x8) and TIMEOUT (default 12h) may be set. A failed attempt resumes from its newest checkpoint.
set -euo pipefail
: "${IMAGE:?image of the Dockerfile}" "${BUCKET:?OWNER/NAME of a bucket}"
config=${1:?CONFIG}
shift
exec hf jobs run --detach --flavor "${FLAVOR:-h200x8}" --timeout "${TIMEOUT:-12h}" --attempts 3 --secrets HF_TOKEN \
  --env HF_HOME=/tmp/huggingface --volume "hf://buckets/$BUCKET:/bucket" ${HF_JOBS_OPTIONS:-} "$IMAGE" \
  zerolora train "/bucket/$config" output_dir="/bucket/runs/$(basename "$config" .yaml)" \
  training.resume_from_checkpoint=auto "$@"
