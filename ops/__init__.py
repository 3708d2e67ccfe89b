"""Fused LoRA operators of zerolora: CUDA kernels built by DeepSpeed's op builder, and plain-torch references."""

# launcher/cli.py looks for "zerolora" in this file.

from ops import elementwise, groups
from ops.backend import check_kernels_available, get_loaded_backend, load_backend, predict_backend
from ops.eight_bit import EightBitWeight, eight_bit_group, eight_bit_linear
from ops.experts import ExpertAdapter, ExpertMatrix, ExpertWeights, experts_mlp
from ops.grouped import grouped_group, grouped_linear
from ops.lora import lora_group, lora_linear
from ops.nf4 import Nf4Weight, nf4_group
from ops.primitives import lora_backward
from ops.scaled import ScaledWeight, scaled_group, scaled_linear

__all__ = [
    "EightBitWeight",
    "ExpertAdapter",
    "ExpertMatrix",
    "ExpertWeights",
    "Nf4Weight",
    "ScaledWeight",
    "check_kernels_available",
    "eight_bit_group",
    "eight_bit_linear",
    "elementwise",
    "experts_mlp",
    "get_loaded_backend",
    "grouped_group",
    "grouped_linear",
    "groups",
    "load_backend",
    "lora_backward",
    "lora_group",
    "lora_linear",
    "nf4_group",
    "predict_backend",
    "scaled_group",
    "scaled_linear",
]
