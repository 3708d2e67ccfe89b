"""The summaries that a run prints at its start and end."""

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import nn

from trainer.config import RunConfig
from trainer.model.adapter import adapted_layers, count_parameters
from trainer.monitor.report.write import next_commands


def start_summary(model: nn.Module, config: RunConfig, precision: str, devices: str) -> list[Any]:
    """Return a table of the adapted layers, and a line on trained parameters, precision, ZeRO stage and devices."""
    lines: list[Any] = []
    if config.adapter != "none":
        table = Table(box=None, pad_edge=False)
        for heading, side in (("adapted", "left"), ("in -> out", "left"), ("layers", "right"), ("parameters", "right")):
            table.add_column(heading, justify="left" if side == "left" else "right")
        for layer in adapted_layers(model):
            table.add_row(layer.name, layer.shape, str(layer.count), f"{layer.parameters:,}")
        lines.append(table)
    trainable, total = count_parameters(model)
    trains = f"trains {trainable:,} of {total:,} parameters ({trainable / total:.2%})"
    return [*lines, f"{trains} in {precision}, ZeRO stage {config.zero.stage}, {devices}"]


def end_summary(
    run_dir: Path, config: RunConfig, report: Path | None, before: float | None, after: float | None
) -> list[str]:
    """Return the change of the held-out loss, the output paths, and commands to run next."""
    lines = []
    if before is not None and after is not None:
        lines.append(f"held-out loss [bold]{before:.4f} -> {after:.4f}[/bold] ({after / before - 1:+.1%})")
    lines.append(_row("model" if config.adapter == "none" else "adapter", str(run_dir)))
    if report is not None:
        lines.append(_row("report", str(report)))
    commands = next_commands(str(run_dir), config.model_dump(mode="json"))
    return lines + [_row(name, command) for name, command in commands]


def _row(name: str, value: str) -> str:
    return f"{name:<12} {escape(value)}"
