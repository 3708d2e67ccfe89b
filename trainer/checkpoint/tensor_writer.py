"""Safetensors files written from the tensors' own memory, without holding Python's global lock.

safetensors' `save_file` copies every tensor into a bytes object first, under that lock: the thread that writes a
checkpoint would keep the one that launches kernels from doing so.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors of the CPU."""
    # A tensor is read where it begins, which must be a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.nbytes:
                _write(file.fileno(), tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write(descriptor: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
