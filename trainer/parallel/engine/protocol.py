"""Declare the members of DeepSpeed's engine that zerolora uses; a test compares them with a real engine."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Engine(Protocol):
    module: Any
    """Model passed to `start_engine`."""
    device: torch.device
    optimizer: Any
    """DeepSpeed's wrapper around `basic_optimizer`; at stage 0 in fp32, `basic_optimizer` itself."""
    basic_optimizer: torch.optim.Optimizer
    """Optimizer passed to `start_engine`."""
    global_rank: int
    world_size: int
    global_steps: int
    skipped_steps: int
    """Steps that DeepSpeed skipped because of a non-finite gradient."""
    backward: Callable[..., Any]
    """Backward pass: divides the loss by the accumulation steps, and reduces gradients in the last micro-step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""

    def step(self) -> Any:
        """Run an optimizer step in the last micro-step; do nothing in other micro-steps."""

    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
    def destroy(self) -> Any: ...
    def fp16_enabled(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...

    def get_global_grad_norm(self) -> Any:
        """Return the last step's global gradient norm before clipping, as a number or tensor; None before any step."""
        ...
