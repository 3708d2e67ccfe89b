"""Fused LoRA operators of zerolora: CUDA kernels built by DeepSpeed's op builder, and the same in plain torch."""

from ops import groups
from ops.backend import Backend, build_beside, expected, load, loaded
from ops.eight_bit import EightBitWeight, eight_bit_group, eight_bit_linear
from ops.experts import ExpertAdapter, ExpertMatrix, ExpertWeights, experts_mlp
from ops.lora import lora_group, lora_linear
from ops.nf4 import Nf4Weight, nf4_group
from ops.plain import lora_backward
from ops.scaled import ScaledWeight, scaled_group, scaled_linear

__all__ = [
    "Backend",
    "EightBitWeight",
    "ExpertAdapter",
    "ExpertMatrix",
    "ExpertWeights",
    "Nf4Weight",
    "ScaledWeight",
    "build_beside",
    "eight_bit_group",
    "eight_bit_linear",
    "expected",
    "experts_mlp",
    "groups",
    "load",
    "loaded",
    "lora_backward",
    "lora_group",
    "lora_linear",
    "nf4_group",
    "scaled_group",
    "scaled_linear",
]
