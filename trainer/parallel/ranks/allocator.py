"""How torch's allocator cuts up a GPU's memory: imported before torch, which reads the variable once.

Segments that grow leave no pieces between activations that the next step's largest tensor does not fit into.
"""

import os

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What a user sets is left alone, under torch's new name or its old one."""

if not any(name in os.environ for name in NAMES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
