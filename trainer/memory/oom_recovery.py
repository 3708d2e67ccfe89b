"""Recover from out-of-memory errors in a step: restart with half the micro-batch, or suggest settings.

Gradient accumulation doubles, so a step trains on the same samples and the loss curve does not change. The other ranks
may be waiting in a collective, where no message reaches them. So the failed rank writes a note and exits; the launcher
restarts all ranks from the newest checkpoint, as after any other failure (launcher/supervision/restarts.py).
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from trainer.config import RunConfig, UserError
from trainer.contract.exit_codes import EXIT_FAILED, EXIT_RESTART
from trainer.contract.restart_record import RestartNote
from trainer.memory.advice import find_smaller_batch
from trainer.memory.planner import Planner

_CUDA_LIBRARY_ERRORS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
Result = TypeVar("Result")


class StepOutOfMemoryError(UserError):
    """Raised if a step runs out of memory; if `exit_code` is EXIT_RESTART, the launcher follows the restart note."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Recovery:
    """Handles out-of-memory errors in the steps of a run according to `training.on_oom`."""

    def __init__(self, config: RunConfig, world_size: int, planner: type[Planner]) -> None:
        self._config, self._world_size, self._planner = config, world_size, planner
        self.is_updating = False
        """Whether the optimizer step has begun; a smaller micro-batch does not help then."""

    def attempt(self, step: int, last_checkpoint_step: int, run_step: Callable[[], Result]) -> Result:
        """Call `run_step` and return its result; `last_checkpoint_step` is 0 without a checkpoint.

        If memory runs out, raises StepOutOfMemoryError, after writing a note for the launcher if a restart can help.
        """
        self.is_updating = False
        try:
            return run_step()
        except RuntimeError as error:
            in_library = any(text in str(error) for text in _CUDA_LIBRARY_ERRORS)
            if not (isinstance(error, torch.OutOfMemoryError) or in_library):
                raise
            try:
                raise self._record_restart(step, last_checkpoint_step) from error
            except UserError:
                traceback.print_exc()  # into this rank's log, which the launcher reads
                raise

    def _record_restart(self, step: int, last_checkpoint_step: int) -> UserError:
        """Write a restart note if a smaller micro-batch can help; return the error to raise."""
        training = self._config.training
        size, accumulation = training.batch_size, training.gradient_accumulation_steps
        if training.on_oom == "stop" or self.is_updating or size == 1:
            return StepOutOfMemoryError(self._describe_fixes(step))
        new_size, new_accumulation = find_smaller_batch(size, accumulation, size // 2).values()
        note = RestartNote(step, new_size, new_accumulation, self._config.zero.stage)
        note.write(Path(self._config.output_dir) / "logs")
        return StepOutOfMemoryError(
            f"step {step}: out of memory with batch_size {size}; to continue manually, add "
            + " ".join(f"{name}={value}" for name, value in note.format_overrides().items())
            + (" training.resume_from_checkpoint=latest" if last_checkpoint_step else ""),
            EXIT_RESTART,
        )

    def _describe_fixes(self, step: int) -> str:
        training = self._config.training
        when = f"step {step}: out of memory with batch_size {training.batch_size}"
        when += " in the optimizer's step" if self.is_updating else ""
        fixes = {
            "training.optimizer=adamw_8bit": self.is_updating,
            "zero.offload_optimizer=true": self.is_updating,
            "training.on_oom=halve": training.on_oom == "stop" and training.batch_size > 1 and not self.is_updating,
            "training.gradient_checkpointing=true": training.gradient_checkpointing == "none",
            "training.gradient_checkpointing_layers=null": training.gradient_checkpointing_layers is not None,
            **{f"{name}={value}": True for name, value in self._planner.halve_samples(self._config).items()},
            "adapter=qlora": self._config.adapter == "lora",
            "zero.stage=3": self._world_size > 1 and self._config.zero.stage < 3,
        }
        settings = ", or ".join(setting for setting, helps in fixes.items() if helps)
        if not settings:
            return f"{when}; use a smaller model or a larger GPU"
        return f"{when}; use {settings}; `zerolora estimate` shows the memory that each needs"
