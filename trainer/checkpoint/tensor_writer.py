"""Write safetensors files in a few system calls that release the GIL.

A loop over tensors would acquire the GIL for each one and delay the thread that launches kernels.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8
_MAX_BUFFERS = 1024
"""Linux's limit on buffers per `writev` call."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Write contiguous CPU tensors as safetensors, and return the file's XXH3-128 (see `compute_checksum`)."""
    # Largest elements first, because offsets must be multiples of the element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    buffers = [memoryview(len(text).to_bytes(8, "little") + text)]
    buffers += [_view_bytes(tensor) for _, tensor in ordered if tensor.nbytes]
    with path.open("wb", buffering=0) as file:
        rest = buffers[::-1]
        while rest:
            written = os.writev(file.fileno(), rest[: -_MAX_BUFFERS - 1 : -1])
            while rest and written >= len(rest[-1]):
                written -= len(rest.pop())
            if written:
                rest[-1] = rest[-1][written:]
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    """View the tensor's memory without a torch operation, which would release and reacquire the GIL."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.stride(), tensor.device)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
