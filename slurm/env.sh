# Environment of every job, sourced by train.sbatch. Adapt it to your cluster.

# The cluster's own modules, if PyTorch's wheels are not enough:
# module load cuda gcc

# The environment created by `make setup`, on a file system shared by all nodes.
if [ -f "$ZEROLORA_HOME/.venv/bin/activate" ]; then
    source "$ZEROLORA_HOME/.venv/bin/activate"
fi
command -v zerolora >/dev/null || {
    echo "slurm/env.sh: no zerolora in PATH; run \`make setup\` in $ZEROLORA_HOME, or activate your environment here" >&2
    return 1
}

# Compute nodes often have no internet access: fill the cache on the login node (`zerolora prepare`), then
# export HF_HUB_OFFLINE=1
# export HF_HOME=/shared/huggingface

# The network between the nodes, if NCCL or gloo choose the wrong one (`ip -brief address`):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_DEBUG=WARN
