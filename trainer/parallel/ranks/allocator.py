"""Set up torch's allocator for GPU memory; import it before torch, which reads the variable once.

Expandable segments leave no gaps between activations that are too small for the next step's largest tensor.
"""

import os

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's new and old name of the variable; a value set by the user is kept."""

if not any(name in os.environ for name in NAMES):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
