"""Join a run: form the process group, set up torch and agree on all decisions before weights are loaded."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.markup import escape

from trainer.config import RunConfig, TrainingSection, compute_collective_timeout
from trainer.contract import known_versions
from trainer.contract.folder_lock import FolderLock
from trainer.contract.known_versions import replaces
from trainer.data.prepared import PreparedRun, count_samples
from trainer.data.step_count import count_steps, describe_steps, list_step_warnings
from trainer.memory.preflight import MemoryPlan, plan_memory
from trainer.monitor.console import Output
from trainer.parallel.engine.deepspeed_engine import resolve_precision
from trainer.parallel.ranks.agreement import check_ranks_agree
from trainer.parallel.ranks.group import Ranks, form_process_group
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.sequence_group import check_ranks_divisible
from trainer.setup.kinds import find_model_kind
from trainer.tasks.task import Task


@phase("join")
def join_run(
    config: RunConfig, notes: Sequence[str], prepared: PreparedRun, ranks: Ranks, lock: FolderLock | None, log: Output
) -> tuple[str, MemoryPlan, Task, int]:
    """Form the process group, plan memory and steps, and print the decisions.

    A collective call. Returns the precision, the memory plan (with the decisions and the configuration without `auto`),
    the task and the number of steps. `notes` are from loading the configuration. Raises UserError if ranks disagree.
    """
    join_ranks(config, notes, ranks, lock, log)
    precision = resolve_precision(config.training.precision, ranks.device())
    memory = plan_memory(find_model_kind(config).planner, config, prepared, ranks, ranks.device(), precision)
    for note in memory.notes:
        log(note)
    return precision, memory, *build_task(config, memory.config, prepared, ranks, precision, log)


def join_ranks(config: RunConfig, notes: Sequence[str], ranks: Ranks, lock: FolderLock | None, log: Output) -> None:
    check_ranks_divisible(config.parallel.sequence, config.zero, ranks.world_size)
    device = ranks.device()
    timeout, token = compute_collective_timeout(config.training), lock.token if lock is not None else ""
    world = check_ranks_agree(ranks, config.model_dump_json(), Path(config.output_dir), timeout, token)
    form_process_group(ranks, timeout)
    (log.print_always if world.hosts > 1 else log)(world.summary)
    if (warning := known_versions.build_version_warning()) is not None:
        log(f"[yellow]warning:[/yellow] {escape(warning)}")
    resolve_precision(config.training.precision, device)
    for note in notes:
        log(f"note: {escape(note)}")
    set_up_torch(config.training, device)


def build_task(
    config: RunConfig, resolved: RunConfig, prepared: PreparedRun, ranks: Ranks, precision: str, log: Output
) -> tuple[Task, int]:
    """Build the task and print its number of steps; return both. `resolved` is the configuration without `auto`."""
    task = find_model_kind(config).find_task_class(config)(resolved, prepared, ranks, ranks.device(), precision, log)
    samples, data_ranks = count_samples(prepared), config.count_data_ranks(ranks.world_size)
    if (size := config.parallel.sequence) > 1:
        log.print_always(f"sequences: each is split over {size} ranks, which count as one below (parallel.sequence)")
    warnings = list_step_warnings(resolved, samples, data_ranks, config)
    log.print_always(f"steps: {describe_steps(resolved.training, samples, data_ranks)}")
    for warning in warnings:
        log(f"[yellow]warning:[/yellow] {escape(warning)}")
    total_steps = count_steps(resolved.training, samples, data_ranks)
    assert total_steps is not None  # a stream without max_steps was rejected
    return task, total_steps


def set_up_torch(training: TrainingSection, device: torch.device) -> None:
    """Apply the `training` settings that are global in torch, and disable cuDNN's attention."""
    torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = training.cudnn_benchmark
        disable_cudnn_attention()
        if training.memory_fraction:
            torch.cuda.set_per_process_memory_fraction(training.memory_fraction, device)


@replaces("cuDNN as a backend of `scaled_dot_product_attention`")
def disable_cudnn_attention() -> None:
    """Disable cuDNN's attention in this process; packed_attention.py enables it where it is safe.

    With a mask, its gradient is NaN if the last 128-token tile has 64 tokens (torch 2.11 to 2.13, pytorch#196678). Its
    kernel reads out of bounds for FLUX's shapes (torch 2.11, cuDNN 9.19, H200).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
