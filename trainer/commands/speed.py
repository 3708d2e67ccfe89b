"""Predict time and cost for `zerolora estimate` with --network, --price or --card."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer.config import RunConfig, UserError
from trainer.data.step_count import count_steps
from trainer.memory.planner import Planner
from trainer.memory.step_time import REFERENCE_GPU, predict_step
from trainer.setup.kinds import find_model_kind

BYTES_PER_S = {"GB/S": 1e9, "GBIT/S": 1e9 / 8, "GB": 1e9, "GBIT": 1e9 / 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network", help="also predict the speed, with this bandwidth per GPU between hosts, such as 50GB/s"
    )
    parser.add_argument("--price", type=float, help="also predict the cost of the run, with this price per GPU hour")
    parser.add_argument("--card", help=f"predict the speed on this GPU (default: {REFERENCE_GPU})")


def predict(planner: Planner, config: RunConfig, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Predict a resolved configuration's speed, time and cost; None if --network, --price and --card are all unset."""
    if arguments.network is None and arguments.price is None and arguments.card is None:
        return None
    network = resolve_network_bandwidth(planner, arguments)
    if arguments.price is not None and not 0 < arguments.price < float("inf"):
        raise UserError(f"--price {arguments.price:g}: must be above 0")
    if network is None:
        raise UserError("--network: missing, but the GPUs are on several hosts; add it, for example --network 50GB/s")
    if not find_model_kind(config).find_task_class(config).predicts_time:
        fix = "estimate without --network, --price and --card"
        raise UserError(f"task={config.task}: its speed cannot be predicted; {fix}")
    gpu_name = arguments.card or REFERENCE_GPU
    step, note = predict_step(planner, config, gpu_name, network)
    gpus, training = planner.machine.world_size, config.training
    steps = count_steps(training, planner.lengths.samples, config.count_data_ranks(gpus))
    hours = None if steps is None else steps * step.total / 3600
    return {
        "card": gpu_name,
        "note": note,
        "step_s": step.total,
        "parts_s": step.parts,
        "collectives": [asdict(collective) for collective in step.collectives],
        "tokens_per_s": step.tokens * gpus / step.total,
        "hours": hours,
        "cost": None if hours is None or arguments.price is None else hours * gpus * arguments.price,
    }


def resolve_network_bandwidth(planner: Planner, arguments: argparse.Namespace) -> float | None:
    """Return the bytes per second that each GPU receives from other hosts; None if unknown."""
    if arguments.network is None:
        return None if len(set(planner.machine.hosts)) > 1 else float("inf")
    speed = None if "b" in arguments.network.replace("bit", "") else parse_quantity(arguments.network, BYTES_PER_S)
    if not speed:  # `Gb/s` may mean bits or bytes
        raise UserError(f"--network {arguments.network}: not a bandwidth; write 50GB/s or 400Gbit/s per GPU")
    return speed


def parse_quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*", text)
    unit = units.get(match[2].upper()) if match else None
    return None if match is None or unit is None else float(match[1]) * unit


def describe_speed(prediction: dict[str, Any], gpus: int) -> list[str]:
    parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in prediction["parts_s"].items() if seconds)
    speed, step_ms = prediction["tokens_per_s"], prediction["step_s"] * 1e3
    lines = [
        f"predicted on {gpus} x {prediction['card']}: {speed:,.0f} tokens/s, {speed / gpus:,.0f} per GPU; "
        f"{step_ms:.1f} ms per step ({parts})"
    ]
    for collective in prediction["collectives"]:
        size, duration = collective["bytes_received"] / 1e6, collective["seconds"] * 1e3
        lines.append(
            f"{collective['per_step']} x {collective['name']}: {size:.1f} MB received per GPU in {duration:.2f} ms"
        )
    if prediction["note"]:
        lines.append(f"note: {prediction['note']}")
    if prediction["hours"] is not None:
        cost = "" if prediction["cost"] is None else f", cost {prediction['cost']:,.2f}"
        lines.append(f"the run, excluding startup, evaluations and checkpoints: {prediction['hours']:,.2f} hours{cost}")
    return lines
