"""What a run says of itself on the console at its start and its end."""

from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from trainer.config import RunConfig
from trainer.model.adapter import adapted_layers, count_parameters


def start_summary(model: nn.Module, config: RunConfig, precision: str, devices: str) -> list[Any]:
    """The adapted layers by name and shape, and what share of the parameters is trained."""
    lines: list[Any] = []
    if config.adapter != "none":
        table = Table(box=None, pad_edge=False)
        for heading, side in (("adapted", "left"), ("in -> out", "left"), ("layers", "right"), ("parameters", "right")):
            table.add_column(heading, justify="left" if side == "left" else "right")
        for layer in adapted_layers(model):
            table.add_row(layer.name, layer.shape, str(layer.count), f"{layer.parameters:,}")
        lines.append(table)
    trainable, total = count_parameters(model)
    share = f"trains {trainable:,} of {total:,} parameters ({trainable / total:.2%})"
    return [*lines, f"{share} in {precision}, ZeRO stage {config.zero.stage}, {devices}"]


def end_summary(run_dir: Path, config: RunConfig, report: Path, before: float | None, after: float | None) -> list[str]:
    """What training changed, and where its results lie."""
    lines = []
    if before is not None and after is not None:
        lines.append(f"held-out loss [bold]{before:.4f} -> {after:.4f}[/bold] ({after / before - 1:+.1%})")
    lines.append(f"{'model' if config.adapter == 'none' else 'adapter':<12} {run_dir}")
    lines.append(f"{'plots':<12} {report} and {run_dir / 'plots'}")
    if "tensorboard" in config.logging.report_to:
        lines.append(f"{'events':<12} {run_dir / 'tensorboard'}")
        lines.append(f"{'to look':<12} tensorboard --logdir {run_dir / 'tensorboard'}")
    return lines
