# What every job needs before `zerolora` runs; sourced by train.sbatch. Fit it to your cluster.

# The cluster's own modules, if PyTorch's wheels are not enough:
# module load cuda gcc

# The environment that `make setup` made, on a file system that all nodes share.
if [ -f "$ZEROLORA_HOME/.venv/bin/activate" ]; then
    source "$ZEROLORA_HOME/.venv/bin/activate"
fi
command -v zerolora >/dev/null || {
    echo "slurm/env.sh: no zerolora in PATH; run \`make setup\` in $ZEROLORA_HOME, or activate your environment here" >&2
    return 1
}

# Compute nodes often have no way to the internet: fill the cache on the login node (`zerolora prepare`), then
# export HF_HUB_OFFLINE=1
# export HF_HOME=/shared/huggingface

# The network between the nodes, where NCCL or gloo choose the wrong one (`ip -brief address`):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_DEBUG=WARN
