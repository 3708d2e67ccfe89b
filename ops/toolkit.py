"""CUDA toolkits and the GPU architectures they can build the operators for."""

import re
from collections.abc import Sequence

import torch
from deepspeed.ops.op_builder import builder as deepspeed_builder
from torch.utils import cpp_extension

PTX_PREFIX = "compute_"
"""Prefix of architectures built as PTX, which the driver compiles."""
COMMON_ARCHITECTURES = ("75", "80", "86", "89", "90a")  # wgmma exists only in the architecture-specific target 90a


class BuildError(RuntimeError):
    """Raised if the operators cannot be built; `unexpected` marks bugs, as opposed to missing prerequisites."""

    def __init__(self, message: str, unexpected: bool = False) -> None:
        super().__init__(message)
        self.unexpected = unexpected


def find_toolkit_version() -> tuple[int, int]:
    """Return the (major, minor) version of nvcc. Raises BuildError if nvcc is missing."""
    try:
        major, minor = deepspeed_builder.installed_cuda_version()
    except deepspeed_builder.MissingCUDAException as error:
        raise BuildError(
            f"nvcc not found (CUDA_HOME={cpp_extension.CUDA_HOME}): install the CUDA toolkit {torch.version.cuda},"
            " which torch was built with, and set CUDA_HOME, or set ops.backend: reference"
        ) from error
    return int(major), int(minor)


def check_toolkit(toolkit: tuple[int, int], torch_cuda: str) -> None:
    """Raise BuildError if the major versions of nvcc and torch's CUDA differ."""
    if toolkit[0] != int(torch_cuda.split(".")[0]):
        raise BuildError(
            f"nvcc {toolkit[0]}.{toolkit[1]} does not match torch {torch.__version__}, built with CUDA {torch_cuda}:"
            f" set CUDA_HOME to a {torch_cuda} toolkit"
        )


def resolve_architecture(capability: tuple[int, int], toolkit: tuple[int, int]) -> str:
    """Return nvcc's name for an architecture, such as '90a' for (9, 0). Raises BuildError if the GPU is too old."""
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (7, 0):
        raise BuildError(f"{name}: 7.0 (Volta) or higher is required; set ops.backend: reference on this GPU")
    if capability < (7, 5) and toolkit[0] >= 13:
        raise BuildError(f"{name}: nvcc {toolkit[0]}.{toolkit[1]} supports 7.5 or newer; use CUDA 12 and its torch")
    return format_architecture(capability)


def format_architecture(capability: tuple[int, int]) -> str:
    name = f"{capability[0]}{capability[1]}"
    return name + "a" if capability == (9, 0) else name


def list_architectures(toolkit: tuple[int, int]) -> list[str]:
    return [*(["70"] if toolkit[0] == 12 else []), *COMMON_ARCHITECTURES, *(["120"] if toolkit >= (12, 8) else [])]


def build_ptx_flags(names: Sequence[str]) -> list[str]:
    """Return the flag that limits a PTX-only build to kernels of its highest capability, or [] for other builds."""
    ptx = [int(name.removeprefix(PTX_PREFIX)) for name in names if name.startswith(PTX_PREFIX)]
    return [f"-DZEROLORA_CAPABILITY={max(ptx)}"] if ptx and len(ptx) == len(names) else []


def build_gencode_flag(name: str) -> str:
    """Return nvcc's flag for an architecture: machine code for "90a", PTX for "compute_80"."""
    if name.startswith(PTX_PREFIX):
        return f"-gencode=arch={name},code={name}"
    return f"-gencode=arch=compute_{name},code=sm_{name}"


def parse_architectures(capabilities: Sequence[str]) -> list[str]:
    """Return nvcc's names for capabilities such as "9.0". Raises BuildError for invalid or unsupported ones."""
    for text in capabilities:
        if not re.fullmatch(r"\d{1,2}\.\d", text):
            raise BuildError(f"--arch {text}: must be a compute capability, such as 9.0 (H100, H200) or 8.0 (A100)")
    toolkit = find_toolkit_version()
    return sorted({resolve_architecture((int(text[:-2]), int(text[-1])), toolkit) for text in capabilities})
