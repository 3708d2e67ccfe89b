"""Resolve `auto`, check the memory estimate before training, and compare it with the measured peak afterwards."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.config import AUTO, RunConfig, UserError
from trainer.config.files import read_json
from trainer.contract.rendezvous import get_host_name
from trainer.contract.whole_files import write_json
from trainer.data.prepared import PreparedRun, count_samples
from trainer.data.step_count import resolve_eval_and_save_steps, resolve_global_batch
from trainer.memory.advice import describe_memory_shortage
from trainer.memory.bytes import CUDA_CONTEXT_BYTES, Estimate
from trainer.memory.decisions import Decisions, Machine
from trainer.memory.observed import NoEstimateError
from trainer.memory.oom_recovery import Recovery
from trainer.memory.planner import RECOMPUTATION, RECOMPUTED_LAYERS_KEY, Planner, apply_changes, format_gib
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.parallel.ranks.group import Ranks, gather_objects, run_on_main
from trainer.patches.mamba import has_scan_kernels
from trainer.patches.packed_attention import has_flash
from trainer.patches.recompute import compute_host_memory_budget


@dataclass(frozen=True)
class MemoryPlan:
    """The configuration with every `auto` resolved, its estimate and decisions, and notes to print."""

    config: RunConfig
    estimate: Estimate | None
    decisions: Decisions
    planner: type[Planner]
    notes: tuple[str, ...] = ()

    def build_recovery(self, world_size: int) -> Recovery:
        return Recovery(self.config, world_size, self.planner)

    def measure_peak(self) -> int:
        """Return the highest peak memory of any GPU (on CPUs, any process) in bytes; a collective call."""
        return int(max(gather_objects(read_peak_memory_gib())) * 2**30)

    def record(self, run_dir: Path, measured: int, device: torch.device) -> str:
        """Write estimate, measured peak and decisions to run.json. Return a line for the console.

        On a CPU the measurement includes Python and libraries, and nothing is estimated.
        """
        on_gpu = device.type == "cuda"
        estimate = self.estimate if on_gpu else None
        path = run_dir / "run.json"
        record = read_json(path)
        record["decisions"] = self.decisions.to_json()
        record["memory"] = {
            "predicted": None if estimate is None else estimate.to_json(),
            "measured_bytes": measured,
            "measured": "torch.cuda.max_memory_allocated" if on_gpu else "peak resident memory of the process",
        }
        write_json(path, record)
        if estimate is None:
            why = (
                "cannot be estimated for this model"
                if on_gpu
                else "of the process, measured; only GPU memory is predicted"
            )
            return f"{'memory':<12} peak {format_gib(measured)} ({why})"
        error = measured / estimate.peak - 1
        return f"{'memory':<12} {format_gib(estimate.peak)} predicted, {format_gib(measured)} measured ({error:+.1%})"


def plan_memory(
    planner_class: type[Planner],
    config: RunConfig,
    prepared: PreparedRun,
    ranks: Ranks,
    device: torch.device,
    precision: str,
) -> MemoryPlan:
    """Resolve `auto`, check that the run fits, and return the same plan on every rank; a collective call.

    Rank 0 plans for the GPU with the least free memory and broadcasts the plan. If the run does not fit, raises
    UserError on every rank, with suggested changes, unless training.ignore_memory_check is set.
    """
    memory = _measure_usable_memory(config, device)
    free_by_rank = gather_objects((get_host_name(), compute_host_memory_budget()))
    hosts = tuple(host for host, _ in free_by_rank)
    room = min(free // hosts.count(host) for host, free in free_by_rank)

    def plan() -> MemoryPlan:
        on_gpu, flash = device.type == "cuda", has_flash(device, DTYPES[precision])
        own_kernels = _has_own_kernels(config, device)
        machine = Machine(ranks.world_size, on_gpu, precision, own_kernels, flash, has_scan_kernels(), hosts, room)
        return plan_for_machine(planner_class, machine, config, prepared, memory)

    return run_on_main(ranks, plan)


def plan_for_machine(
    planner_class: type[Planner], machine: Machine, config: RunConfig, prepared: PreparedRun, memory: int | None
) -> MemoryPlan:
    """Return the plan for GPUs with `memory` bytes each (None: CPUs). Raises UserError as `plan_memory` does."""
    counts = count_samples(prepared), config.count_data_ranks(machine.world_size)
    config = resolve_global_batch(config, *counts)
    has_auto = AUTO in (config.zero.stage, config.training.batch_size)
    try:
        planner = planner_class.from_run(machine, config, prepared)
        planner.estimate(planner.resolve(config, None))  # runs layers of the model, which may fail
    except (NoEstimateError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A model whose memory cannot be estimated can be trained if no setting depends on the estimate.
        reason = error.reason if isinstance(error, NoEstimateError) else f"{type(error).__name__}: {error}"
        if has_auto:
            raise UserError(
                f"zero.stage or training.batch_size=auto: memory cannot be estimated ({reason}); set both to numbers"
            ) from None
        if config.training.gradient_checkpointing == "auto":
            config = apply_changes(config, {RECOMPUTATION: "none" if memory is None else "non_reentrant"})
        config = resolve_eval_and_save_steps(config, *counts)
        note = f"the memory use of this model cannot be estimated ({reason})"
        return MemoryPlan(config, None, planner_class.decide(config, machine, None), planner_class, (note,))
    resolved = resolve_eval_and_save_steps(planner.resolve(config, memory), *counts)
    estimate = planner.estimate(resolved)
    notes = []
    if has_auto:
        chosen = f"ZeRO stage {resolved.zero.stage}, batch_size {resolved.training.batch_size}"
        reason = f"{format_gib(estimate.peak)} estimated" if memory is not None else "the defaults without a GPU"
        notes.append(f"auto: {chosen}, {reason}")
    if config.training.gradient_checkpointing == "auto" and memory is not None:
        notes.append(describe_recomputation(planner, resolved, memory))
    if shortage := _describe_host_shortage(planner, resolved):
        notes.append(shortage)
    if memory is not None and estimate.needed > memory:
        problem = describe_memory_shortage(planner, resolved, memory, "can use")
        if not resolved.training.ignore_memory_check:
            raise UserError(f"{problem}; to train anyway, set training.ignore_memory_check=true")
        notes.append(f"[yellow]warning:[/yellow] {problem}")
    return MemoryPlan(resolved, estimate, planner.build_decisions(resolved), planner_class, tuple(notes))


def describe_recomputation(planner: Planner, resolved: RunConfig, memory: int) -> str:
    training, estimate = resolved.training, planner.estimate(resolved)
    mode, first = training.gradient_checkpointing, training.gradient_checkpointing_layers
    which = f" for {first} of {len(planner.shapes.layers)} layers" if first else ""
    line = f"auto: gradient checkpointing {mode}{which}, {format_gib(estimate.needed)} estimated"
    without = planner.estimate(apply_changes(resolved, {RECOMPUTATION: "none", RECOMPUTED_LAYERS_KEY: None}))
    needed, available = format_gib(without.needed), format_gib(memory)
    return line if mode == "none" else f"{line}; {needed} without it, {available} available"


def _describe_host_shortage(planner: Planner, resolved: RunConfig) -> str:
    if not (resolved.training.offload_activations and planner.has_sequences and planner.machine.on_gpu):
        return ""
    work = planner.build_micro_step(resolved, planner.build_decisions(resolved))
    needed = planner.estimate_activations(replace(work, host_memory=None)).on_host
    fitting = planner.estimate_activations(work).on_host
    if fitting == needed:
        return ""
    fits = f"only {format_gib(fitting)} of {format_gib(needed)} per rank fit in host memory; the rest stays on the GPU"
    return f"[yellow]warning:[/yellow] training.offload_activations=true: {fits}"


def _has_own_kernels(config: RunConfig, device: torch.device) -> bool:
    """Return whether the CUDA operators will be used. They may still be building."""
    unused = config.adapter == "none" and config.ops.elementwise != "auto"
    if unused or device.type != "cuda" or config.ops.backend not in ("auto", "cuda"):
        return False
    import ops

    return ops.predict_backend(config.ops.backend) == "cuda"


def _measure_usable_memory(config: RunConfig, device: torch.device) -> int | None:
    """Return the usable memory in bytes of the GPU with the least; None without a GPU.

    This is the free memory, limited by training.memory_fraction, plus the CUDA context: estimates include the
    context, but it already exists when free memory is measured. A collective call.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    usable = min(free, int(total * (config.training.memory_fraction or 1.0)))
    return min(gather_objects(usable)) + CUDA_CONTEXT_BYTES


def read_peak_memory_gib() -> float:
    """Return the peak memory of this rank's GPU, or of its process on a CPU, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
