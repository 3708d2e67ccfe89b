"""What is used of DeepSpeed's engine; a test holds it against a real one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Engine(Protocol):
    """DeepSpeed's engine around a model and its optimizer, on one rank."""

    module: Any
    """The model that `start_engine` was given."""
    device: torch.device
    optimizer: Any
    """DeepSpeed's around `basic_optimizer`, by stage and precision; at stage 0 in 32 bits `basic_optimizer` itself."""
    basic_optimizer: torch.optim.Optimizer
    """The one that `start_engine` was given."""
    global_rank: int
    world_size: int
    global_steps: int
    skipped_steps: int
    """Steps that DeepSpeed did not apply because a gradient was not finite."""
    backward: Callable[..., Any]
    """Of a loss, which it divides by the accumulation steps; reduces the gradients in the last micro-step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        ...

    def step(self) -> Any:
        """One optimizer step, in the last micro-step; nothing in the others."""
        ...

    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...
    def zero_grad(self) -> Any: ...
    def destroy(self) -> Any: ...
    def fp16_enabled(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def set_train_micro_batch_size(self, micro_batch_size: int) -> Any: ...
    def set_train_batch_size(self, train_batch_size: int) -> Any:
        """Of all ranks and micro-steps; the number of micro-steps follows from it."""
        ...

    def get_global_grad_norm(self) -> Any:
        """Of the last step, over all ranks and before clipping: a number, a tensor, or None before the first step."""
        ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> Any:
        """Whether the next backward pass is the last of its step."""
        ...

    def allreduce_gradients(self) -> Any:
        """Reduce what the backward passes have left."""
        ...
