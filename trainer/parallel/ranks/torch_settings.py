"""Global settings of torch in the process of a rank."""

import torch

from trainer.config import TrainingSection
from trainer.contract.replacements import replaces


def set_up_torch(training: TrainingSection, device: torch.device) -> None:
    """Apply the settings of `training` that are global to torch, and turn cuDNN's attention off."""
    torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = training.cudnn_benchmark
        disable_cudnn_attention()
        if training.memory_fraction:
            torch.cuda.set_per_process_memory_fraction(training.memory_fraction, device)


@replaces(
    "cuDNN as a backend of `scaled_dot_product_attention`",
    library="torch",
    read_in="2.13.0",
    why="its gradients are NaN with a mask if the last tile of 128 tokens holds 64, and at FLUX's shapes",
    active="training on a GPU; causal attention without a mask over whole tiles still uses cuDNN",
    test="tests/unit/test_attention.py: test_cudnn_is_left_to_whole_tiles",
    upstream="https://github.com/pytorch/pytorch/issues/196678",
)
def disable_cudnn_attention() -> None:
    """Let torch use cuDNN's attention in this process only on request (packed_attention.py).

    Its gradient is NaN with a mask if the last tile of 128 tokens holds 64 (torch 2.11 to 2.13, pytorch#196678), and
    reads out of bounds at FLUX's shapes (torch 2.11, cuDNN 9.19, an H200).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
