# For hosts with NVIDIA GPUs, as the user `ubuntu` (1000). Models, tokenized data and compiled operators are kept in /cache:
#   docker build -t zerolora . && mkdir -p runs cache && chmod 777 runs cache
#   docker run --gpus all --ipc host -v "$PWD/runs:/zerolora/runs" -v "$PWD/cache:/cache" zerolora zerolora train ...
# The devel image brings nvcc, with which the fused operators are compiled at their first use. Its CUDA release should be that
# of the torch in constraints.txt (python -c 'import torch; print(torch.version.cuda)'): docker build --build-arg CUDA=...
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

# DeepSpeed compiles its host operators when it starts (g++, python3-dev); Open MPI, ssh and pdsh are for several machines.
RUN apt-get update && apt-get install -y --no-install-recommends \
        git make g++ python3 python3-dev python3-venv libopenmpi-dev openmpi-bin openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /zerolora
# A builder has no driver to be found, so that the accelerator is named.
ENV VENV=/opt/venv ACCELERATOR=cuda EXTRAS=gpu,mpi,eval,wandb CUDA_HOME=/usr/local/cuda PATH=/opt/venv/bin:$PATH
# Dependencies in a layer of their own, kept while only our code changes.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
RUN scripts/setup.sh && rm -rf /root/.cache/pip
COPY --chown=ubuntu . .
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
RUN mkdir -p /cache && chown ubuntu /cache /zerolora
USER ubuntu
ENV HF_HOME=/cache/huggingface ZEROLORA_CACHE=/cache/zerolora TORCH_EXTENSIONS_DIR=/cache/operators TRITON_CACHE_DIR=/cache/triton

CMD ["make", "demo"]
