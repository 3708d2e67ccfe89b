"""`zerolora estimate CONFIG [--gpus N] [--gpu-memory 80GiB] [--json] [key=value ...]`: estimate a run's memory.

With `--network 50GB/s`, `--price 2.5` or `--card H100`, also estimate speed, time and cost.

Needs neither a GPU nor weights: the model is built without them. Sequence lengths come from the data; if the data
cannot be read, every sequence counts as `dataset.max_length` tokens.
"""

import json
import os
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.checkpoint.finished_run import silence_libraries
from trainer.commands import speed
from trainer.commands.longest_sequence import find_longest_sequences, format_longest_sequences, predict_seconds
from trainer.config import CommandParser, RunConfig, UserError, load_config, reports_errors
from trainer.config.command_line import parse_rank_count
from trainer.contract.default_ranks import list_visible_gpus
from trainer.contract.standard_streams import PROGRESS
from trainer.data.step_count import count_steps, describe_steps
from trainer.memory.advice import describe_memory_shortage
from trainer.memory.bytes import CUDA_CONTEXT_BYTES, GIB, Estimate
from trainer.memory.decisions import Machine
from trainer.memory.planner import PlanChoice, Planner, combine_adapters, format_gib
from trainer.memory.preflight import describe_recomputation
from trainer.memory.step_time import REFERENCE_GPU
from trainer.model.base import get_context_length
from trainer.parallel.ranks.sequence_group import check_ranks_divisible
from trainer.setup.kinds import find_model_kind

UNITS = {"": GIB, "G": GIB, "GIB": GIB, "GB": 10**9, "M": 2**20, "MIB": 2**20, "MB": 10**6, "T": 2**40, "TIB": 2**40}
MIN_GPU_MEMORY = GIB
GPUS_PER_HOST = 8
DEFAULT_GPU = "80GiB"
DECISIONS = {"attention": "attention", "fused_head": "loss fused with the head", "flat": "adapter in one buffer"}
"""Titles of the decisions that cost memory if they differ from the default."""


def parse_memory(text: str, option: str = "--gpu-memory") -> int:
    """Parse `80GiB`, `80GB`, `81920MiB` or `80` (GiB) into bytes. Raises UserError if invalid or below 1 GiB."""
    size = speed.parse_quantity(text, UNITS)
    if size is None:
        raise UserError(f"{option} {text}: not an amount of memory; write 80GiB, 24GB or 40960MiB")
    if not MIN_GPU_MEMORY <= size <= 2**50:
        raise UserError(f"{option} {text}: {size / GIB:.3g} GiB is out of range; use a value from 1GiB to 1024TiB")
    return int(size)


def build_report(
    planner: Planner, config: RunConfig, memory: int, notes: list[str]
) -> tuple[dict[str, Any], RunConfig]:
    resolved = planner.resolve(config, memory)
    if config.training.gradient_checkpointing == "auto":
        notes = [*notes, describe_recomputation(planner, resolved, memory)]
    counts = resolved.training, planner.lengths.samples, config.count_data_ranks(planner.machine.world_size)
    pixels = f"{resolved.image.resolution} x {resolved.image.resolution} pixels"
    sample = f"{planner.lengths.longest:,} tokens" if planner.has_sequences else pixels
    estimate = planner.estimate(resolved)
    table = planner.list_stages(resolved)
    # Prefer a higher stage to offloading, which is slower.
    fitting = [choice.config for choice in table if choice.needed <= memory]
    best = min(fitting, key=lambda config: config.zero.offload_optimizer + config.zero.offload_parameters, default=None)
    return {
        "model": config.base_model,
        "gpus": planner.machine.world_size,
        "gpu_memory_bytes": memory,
        "notes": notes,
        "stage": resolved.zero.stage,
        "batch_size": resolved.training.batch_size,
        "length": planner.lengths.longest,
        "sample": sample,
        "steps": None if config.runs or count_steps(*counts) is None else describe_steps(*counts),
        "estimate": estimate.to_json(),
        "bytes_received": planner.estimate_received_bytes(resolved),
        "fits": estimate.needed <= memory,
        "recommended": None if best is None else _recommend(planner, best, memory),
        "largest_batch_size": _find_max_batch(planner, resolved, memory),
        "decisions": planner.build_decisions(resolved).to_json(),
        "stages": [_build_stage_row(planner, choice, memory) for choice in table],
    }, resolved


def _recommend(planner: Planner, best: RunConfig, memory: int) -> dict[str, Any]:
    names = [name for name in ("offload_optimizer", "offload_parameters") if getattr(best.zero, name)]
    offloads = {f"zero.{name}": True for name in names}
    return {"zero.stage": best.zero.stage, **offloads, "training.batch_size": _find_max_batch(planner, best, memory)}


def _find_max_batch(planner: Planner, config: RunConfig, memory: int) -> int:
    """Return the largest batch_size that leaves a memory reserve, or the configured one if it is larger and fits."""
    configured = config.training.batch_size if planner.estimate(config).needed <= memory else 0
    return max(configured, planner.find_largest_batch(config, memory))


def _build_stage_row(planner: Planner, choice: PlanChoice, memory: int) -> dict[str, Any]:
    zero = choice.config.zero
    row: dict[str, Any] = {
        "stage": zero.stage,
        "offload_optimizer": zero.offload_optimizer,
        "offload_parameters": zero.offload_parameters,
        "gather": planner.build_decisions(choice.config).gather.value if zero.stage == 3 else None,
    }
    if choice.estimate is None:
        return row | {"refused": choice.error}
    return row | choice.estimate.to_json() | {"fits": choice.estimate.needed <= memory}


def print_report(console: Console, result: dict[str, Any], estimate: Estimate) -> None:
    for note in result["notes"]:
        console.print(note, highlight=False)
    console.print(
        f"on {'1 GPU' if result['gpus'] == 1 else 'each of {} GPUs'.format(result['gpus'])} of "
        f"{format_gib(result['gpu_memory_bytes'])}{' (assumed; set --gpu-memory)' * result['gpu_is_assumed']}: "
        f"ZeRO stage {result['stage']}, micro-batch {result['batch_size']} x {result['sample']}",
        highlight=False,
    )
    if result["steps"] is not None:
        console.print(f"steps: {result['steps']}", highlight=False)
    for name, choice in result["decisions"].items():
        if choice["reason"] and name in DECISIONS:
            console.print(f"{DECISIONS[name]}: {choice['value']} ({choice['reason']})", highlight=False, markup=False)
    parts = Table("for", "GiB", box=None, pad_edge=False)
    for name, size in sorted(estimate.terms.items(), key=lambda term: -term[1]):
        parts.add_row(name, f"{size / GIB:.2f}")
    parts.add_row(f"peak (at the {estimate.moment})", f"{estimate.peak / GIB:.2f}", end_section=True)
    parts.add_row("unused memory held by torch's allocator", f"{estimate.slack / GIB:.2f}")
    parts.add_row("CUDA context and NCCL", f"{CUDA_CONTEXT_BYTES / GIB:.2f}")
    parts.add_row("needed", f"{estimate.needed / GIB:.2f}")
    console.print(parts)
    traffic = {name.replace("_", " "): size / 1e9 for name, size in result["bytes_received"].items()}
    if any(traffic.values()):
        received = ", ".join(f"{size:.2f} GB of {name}" for name, size in traffic.items())
        console.print(f"each GPU receives per step: {received}", highlight=False)
    for line in speed.describe_speed(result["speed"], result["gpus"]) if result["speed"] else ():
        console.print(line, highlight=False)
    host, disk = format_gib(estimate.host), format_gib(estimate.disk)
    console.print(f"host memory per rank: {host}, plus the process itself; disk space: {disk}")
    stages = Table("stage", "offloaded", "peak GiB", "needed GiB", "host GiB", "", box=None, pad_edge=False)
    for row in result["stages"]:
        offloaded = [name for name in ("optimizer", "parameters") if row[f"offload_{name}"]]
        label = f"{row['stage']}" + (f" by {row['gather']}" if row["gather"] else "")
        if "refused" in row:
            stages.add_row(label, ", ".join(offloaded) or "nothing", "", "", "", "not possible")
            continue
        sizes = [f"{row[name] / GIB:.2f}" for name in ("peak_bytes", "needed_bytes", "host_bytes")]
        stages.add_row(label, ", ".join(offloaded) or "nothing", *sizes, "fits" if row["fits"] else "too large")
    console.print(stages)
    for refusal in dict.fromkeys(row["refused"] for row in result["stages"] if "refused" in row):
        console.print(f"not possible: {refusal}", highlight=False, markup=False)
    if result["recommended"] is not None:
        settings = " ".join(f"{name}={str(value).lower()}" for name, value in result["recommended"].items())
        line = f"the lowest stage that fits, with the largest micro-batch: {settings}"
        console.print(line if result["fits"] else f"too large as configured; {line}", highlight=False)


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="zerolora estimate", description="Estimate a run's memory, without a GPU or weights.")
    parser.add_config()
    gpus_help = "number of GPUs, one rank each (default: the GPUs of this machine, or 1)"
    parser.add_argument("--gpus", type=parse_rank_count, help=gpus_help)
    parser.add_argument("--gpus-per-host", type=int, help="GPUs per host (default: all GPUs are on one host)")
    parser.add_argument("--gpu-memory", help=f"memory of each GPU, such as {DEFAULT_GPU} (default)")
    parser.add_argument("--host-memory", help="memory of each host, such as 256GiB (default: unlimited)")
    parser.add_argument("--max-length", choices=["auto"], help="print only the longest sequence that fits")
    speed.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_intermixed_args(argv)
    silence_libraries()
    gpus = arguments.gpus or len(list_visible_gpus()) or 1
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here computes on a device
    if (per_host := arguments.gpus_per_host) is not None and (not 1 <= per_host <= gpus or gpus % per_host):
        raise UserError(f"--gpus-per-host {per_host}: must be between 1 and --gpus ({gpus}), and divide it")
    host = parse_memory(arguments.host_memory, "--host-memory") if arguments.host_memory is not None else None
    memory = parse_memory(DEFAULT_GPU if arguments.gpu_memory is None else arguments.gpu_memory)
    loaded = load_config(arguments.config, arguments.overrides)
    config = loaded.config
    check_ranks_divisible(config.parallel.sequence, config.zero, gpus)
    if config.runs:
        config = combine_adapters(config, config.runs, on_gpu=True)
    PROGRESS.show(f"reading {config.base_model} and the data")
    # A network between hosts implies several hosts.
    per_host = arguments.gpus_per_host or (min(GPUS_PER_HOST, gpus) if arguments.network else None)
    planner, notes = build_planner(config, gpus, per_host)
    if host is not None:
        ranks = planner.machine.hosts.count(planner.machine.hosts[0])
        planner = replace(planner, machine=replace(planner.machine, host_memory=host // ranks))
    context = get_context_length(planner.shapes.model.config) if planner.has_sequences else None
    config = config.fit_max_length(context)
    if config.runs:
        notes.append(f"{len(config.runs)} adapters: estimated as one, with the sums of their ranks and batch sizes")
    if arguments.max_length and not planner.has_sequences:
        raise UserError("--max-length auto: image models have no sequences; remove the option")
    if arguments.max_length:
        longest = find_longest_sequences(planner, config, memory)
        gpu_name = REFERENCE_GPU if arguments.card is None else arguments.card
        network = speed.resolve_network_bandwidth(planner, arguments)
        seconds = {} if network is None else predict_seconds(planner, config, memory, longest, gpu_name, network)
        rows = {size: {"tokens": length, "step_s": seconds.get(size)} for size, length in longest.items()}
        lines = format_longest_sequences(longest, seconds, gpu_name, context)
        print(json.dumps(rows) if arguments.json else "\n".join(lines))
        return
    result, resolved = build_report(planner, config, memory, [*loaded.notes, *notes])
    result["speed"] = speed.predict(planner, resolved, arguments)
    result["gpu_is_assumed"] = arguments.gpu_memory is None
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(Console(soft_wrap=True), result, planner.estimate(resolved))
    if result["recommended"] is None:
        raise UserError(describe_memory_shortage(planner, resolved, memory, "has"))


def build_planner(config: RunConfig, world_size: int, ranks_per_host: int | None = None) -> tuple[Planner, list[str]]:
    """Build a memory planner for GPUs that need not exist, and return it with notes on its assumptions."""
    precision = "bf16" if config.training.precision == "auto" else config.training.precision
    machine = Machine.assume_gpus(world_size, precision, ranks_per_host)
    return find_model_kind(config).build_unprepared_planner(config, machine)
