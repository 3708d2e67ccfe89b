# For hosts with NVIDIA GPUs: docker build -t zerolora . && docker run --gpus all --ipc host -v "$PWD/runs:/zerolora/runs" zerolora
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
ENV VENV=/opt/venv ACCELERATOR=cuda EXTRAS=dev,gpu,mpi,wandb CUDA_HOME=/usr/local/cuda PATH=/opt/venv/bin:$PATH
# Dependencies in a layer of their own, kept while only our code changes.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
RUN scripts/setup.sh && rm -rf /root/.cache/pip
COPY . .

CMD ["make", "demo"]
