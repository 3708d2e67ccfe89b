"""Recovery from out-of-memory errors in a step: halve the micro-batch, double the accumulation, repeat the step.

The loss curve does not change, because a step trains on the same samples however they are split. Nothing is skipped: no
rank has changed a weight when a step is abandoned.

Stages 0 and 1 do it in the process. They communicate at the end of a step only, so every rank comes to one question,
asked over the hosts' network (gloo; the GPUs are not waited for): did any of us run out? Only then are gradients
reduced. For this, no micro-step is marked as the last for DeepSpeed, and its reduction is called here (read in 0.19.8:
engine.backward reduces where `is_gradient_accumulation_boundary`, stage 1 also in its gradient hooks if
`overlap_comm`, which trainer/parallel/engine/deepspeed_engine.py turns off).

At stages 2 and 3, and if ranks share sequences, the other ranks sit in a collective of their own pass, which no message
reaches. The rank leaves a note and ends; the launcher starts all of them again from the newest checkpoint, as after any
other failure (launcher/supervision/restarts.py).
"""

import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.config import RunConfig, UserError
from trainer.contract.exit_codes import EXIT_RESTART
from trainer.contract.known_versions import require
from trainer.contract.replacements import replaces
from trainer.contract.restart_record import MOST_HALVINGS, RestartNote
from trainer.memory.advice import smaller_batch, smaller_samples
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.tasks.task import BatchSource

_ALSO_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
Result = TypeVar("Result")


class OutOfMemory(UserError):
    """A step did not fit, and the run cannot or must not continue with a smaller micro-batch."""

    exit_code = 1


class RestartSmaller(UserError):
    """A step did not fit, and the launcher should restart the run with the settings of the restart note."""

    exit_code = EXIT_RESTART


class _OutOfMemoryElsewhere(Exception):
    """Another rank abandoned this step."""


@dataclass(frozen=True)
class Halving:
    """A smaller micro-batch, from this step to the end of the run."""

    step: int
    batch_size: int
    gradient_accumulation_steps: int


@replaces("the gradient reduction, and its state after an aborted pass")
class Recovery:
    """Guards the steps of a run according to `training.on_oom`."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        engine: Engine,
        batches: BatchSource,
        small_pass: Callable[[Any], object],
        say: Callable[[str], None],
        release: Callable[[str], None] | None = None,
    ) -> None:
        """Every rank must call it. `batches` is the loop's source of batches; its batch size is changed in place.

        `small_pass` runs the model on its smallest input; `release(reason)` frees what depends on the size of
        micro-batches.
        """
        self._config, self._ranks, self._engine, self._batches, self._say = config, ranks, engine, batches, say
        self._small_pass, self._let_go = small_pass, release
        self._halves = config.training.on_oom == "halve"
        self._in_process = self._halves and config.zero.stage < 2 and config.parallel.sequence == 1
        self._agreed = False
        self.halvings: list[Halving] = []
        """Every change of the micro-batch in this process."""
        self._group: Any = None
        if self._in_process and ranks.world_size > 1:
            self._group = dist.new_group(backend="gloo")

    def attempt(self, step: int, saved_at: int, launch: Callable[[], Result]) -> Result:
        """Return `launch()`, repeated with smaller micro-batches while any rank runs out of memory.

        `step` counts from 1, `saved_at` is the step of the newest checkpoint. Raises OutOfMemory or RestartSmaller if
        the step cannot be repeated in this process.
        """
        while True:
            random_states = _random_states() if self._in_process else None
            failure = ""
            try:
                return launch()
            except _OutOfMemoryElsewhere:
                pass
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self._in_process or self._agreed:
                    self._give_up(step, saved_at, error)
                failure = str(error).splitlines()[0]
            # Only here has the traceback released the activations.
            if failure:
                print(f"step {step}: {failure}", file=sys.stderr, flush=True)
                self._any_rank(True)
            self._discard_gradients()
            self._recut(step)
            _restore_random_states(random_states)

    def hold_reduction(self) -> None:
        """Before the first micro-step, make DeepSpeed accumulate gradients without reducing them."""
        self._agreed = False
        if self._in_process:
            self._engine.set_gradient_accumulation_boundary(False)

    def agree_and_reduce(self) -> None:
        """After the last backward pass, reduce gradients if no rank ran out of memory, else abandon the step."""
        if self._in_process:
            if self._any_rank(False):
                raise _OutOfMemoryElsewhere
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
        self._agreed = True

    def _any_rank(self, out_of_memory: bool) -> bool:
        """Return whether any rank ran out of memory; every rank must call it."""
        if self._group is None:
            return out_of_memory
        answer = torch.tensor([int(out_of_memory)])
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        return bool(answer.item())

    def _discard_gradients(self) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        engine.zero_grad()
        if engine.zero_optimization_stage() == 1:  # interrupted between its hooks
            release = require(optimizer, "_release_ipg_buffers", "deepspeed")
            require(optimizer, "_backward_active_depth", "deepspeed")
            optimizer.zero_grad()
            release()
            optimizer._backward_active_depth = 0
        # Results of shared-input projections and offloaded inputs are cached, and with them the whole graph of the
        # abandoned pass. A short pass without gradients replaces them.
        with torch.no_grad():
            self._small_pass(engine.module)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._let_go is not None:
            self._let_go("a step ran out of memory")

    def _recut(self, step: int) -> None:
        """Set a smaller micro-batch in the batches and the engine; raises OutOfMemory if there is none."""
        batches = self._batches
        smaller = self._smaller()
        if smaller is None or len(self.halvings) == MOST_HALVINGS:
            raise OutOfMemory(self._with_fixes(step))
        size, accumulation = smaller
        self._say(
            f"[yellow]step {step}: out of memory with batch_size {batches.batch_size}[/yellow]; repeated with "
            f"{size}, accumulation {accumulation}"
        )
        batches.batch_size, batches.accumulation = size, accumulation
        self._engine.set_train_micro_batch_size(size)
        self._engine.set_train_batch_size(size * accumulation * self._ranks.world_size)
        if hasattr(self._engine.optimizer, "gradient_accumulation_steps"):  # DeepSpeed's, at stage 1
            self._engine.optimizer.gradient_accumulation_steps = accumulation
        self.halvings.append(Halving(step, size, accumulation))

    def _smaller(self) -> tuple[int, int] | None:
        size, accumulation = self._batches.batch_size, self._batches.accumulation
        if size == 1:
            return None
        changes = smaller_batch(size, accumulation, size // 2)
        return changes["training.batch_size"], changes["training.gradient_accumulation_steps"]

    def _give_up(self, step: int, saved_at: int, error: RuntimeError) -> None:
        """Write a note for the launcher if a restart can help, and log what happened."""
        smaller = self._smaller()
        failure: UserError
        if self._halves and not self._agreed and smaller is not None:
            note = RestartNote(step, *smaller, self._config.zero.stage)
            note.write(Path(self._config.output_dir) / "logs")
            failure = RestartSmaller(
                f"step {step}: out of memory with batch_size {self._batches.batch_size}; to continue manually add "
                + " ".join(f"{name}={value}" for name, value in note.settings().items())
                + (" training.resume_from_checkpoint=latest" if saved_at else "")
            )
        else:
            failure = OutOfMemory(self._with_fixes(step))
        try:
            raise failure from error
        except UserError:
            traceback.print_exc()  # into this rank's log, which the launcher reads
            raise

    def _with_fixes(self, step: int) -> str:
        training, size = self._config.training, self._batches.batch_size
        when = f"step {step}: out of memory with batch_size {size}"
        if self.halvings:
            when += f", which was halved {len(self.halvings)} times"
        ways = []
        if self._agreed:
            when += " in the optimizer's step"
            ways += ["training.optimizer=adamw_8bit", "zero.offload_optimizer=true"]
        elif not self._halves and size > 1:
            ways.append("training.on_oom=halve")
        if training.gradient_checkpointing == "none":
            ways.append("training.gradient_checkpointing=true")
        elif training.gradient_checkpointing_layers:
            ways.append("training.gradient_checkpointing_layers=null")
        ways += [f"{name}={value}" for name, value in smaller_samples(self._config).items()]
        if self._config.adapter == "lora":
            ways.append("adapter=qlora")
        if self._ranks.world_size > 1 and self._config.zero.stage < 3:
            ways.append("zero.stage=3")
        return f"{when}; use {', or '.join(ways)}; `zerolora estimate` shows what each would need"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch or of a CUDA library is an out-of-memory error."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _ALSO_OUT_OF_MEMORY)


def _random_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), on_gpu


def _restore_random_states(states: tuple[torch.Tensor, torch.Tensor | None] | None) -> None:
    if states is None:
        return
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
