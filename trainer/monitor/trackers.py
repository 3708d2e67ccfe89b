"""TensorBoard and services that show the metrics of runs (`logging.report_to`). Rank 0 only."""

import importlib
import json
import re
import secrets
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.markup import escape

from trainer.config import LoggingSection
from trainer.config.files import read_json
from trainer.contract.whole_files import write_json
from trainer.monitor.report.recorded import flatten

IDENTITY_FILE = "tracker-ids.json"
"""The run's id in each service, so that a resumed run continues there."""
# TensorBoard's page sorts groups by name, capitals first: it opens on these, and not on eval/bpt.
ON_TOP = {"train/loss": "Loss/training", "eval/loss": "Loss/held out"}
CHARTS = {"Loss": {"training and held out": ["Multiline", ["train/loss", "eval/loss"]]}}
Write = Callable[[dict[str, Any], int], object]


@dataclass(frozen=True)
class OpenRun:
    """A run in a service."""

    identity: str
    """Empty if the service needs none."""
    log: Write
    """Records values of a step."""
    finish: Callable[[], object]
    wrap_image: Callable[[Any], Any] | None = None
    """Makes a value for `log` of an image (PIL), if the service has images among its metrics."""


@dataclass(frozen=True)
class _Wanted:
    project: str
    name: str
    folder: Path
    known: str | None
    """Id of the run in the service, if it is known there."""
    settings: dict[str, Any]
    first_step: int

    @property
    def identity(self) -> str:
        return self.known or secrets.token_hex(16)


class Trackers:
    """The open runs of several services."""

    def __init__(
        self,
        logging: LoggingSection,
        run_dir: Path,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        first_step: int,
    ) -> None:
        """Open a run in each service, or continue the one of `run_dir`; `settings` are shown as hyperparameters.

        `first_step` is the number of steps done before.
        """
        self._say, path = say, run_dir / IDENTITY_FILE
        name = logging.run_name or run_dir.resolve().name
        shown = {
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in flatten(settings).items()
        }
        known = read_json(path) if path.is_file() else {}
        self._open = {
            service: _OPEN[service](_Wanted(logging.project, name, run_dir, known.get(service), shown, first_step))
            for service in logging.report_to
        }
        identities = {service: run.identity for service, run in self._open.items() if run.identity}
        if identities:
            write_json(path, known | identities)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        for name, run in [*self._open.items()]:
            self._try(name, run.log, dict(values), step)

    def log_image(self, step: int, title: str, image: Any) -> None:
        """Show an image (PIL) in services that have images among their metrics."""
        for name, run in [*self._open.items()]:
            if run.wrap_image is not None:
                self._try(name, run.log, {title: run.wrap_image(image)}, step)

    def close(self) -> None:
        """End all runs; may be called twice."""
        for name, run in [*self._open.items()]:
            self._try(name, run.finish)
        self._open.clear()

    def _try(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call a service; after an error training continues without it."""
        try:
            call(*arguments)
        except Exception as error:  # of a service or its network
            del self._open[name]
            problem = escape(f"{type(error).__name__}: {error}")
            self._say(f"[yellow]warning:[/yellow] {name}: no more metrics: {problem}")


def _open_wandb(wanted: _Wanted) -> OpenRun:
    wandb = importlib.import_module("wandb")
    identity = wanted.identity
    # console=off: wandb would otherwise intercept the output to the log.
    run = wandb.init(
        project=wanted.project, name=wanted.name, id=identity, resume="allow", dir=str(wanted.folder),
        settings=wandb.Settings(console="off"), config=wanted.settings,
    )  # fmt: skip
    # An explicit step axis: wandb's internal step cannot go back after a resume.
    run.define_metric("*", step_metric="step")
    return OpenRun(identity, lambda values, step: run.log({"step": step, **values}), run.finish, wandb.Image)


def _open_mlflow(wanted: _Wanted) -> OpenRun:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(wanted.project)
    run = mlflow.start_run(run_id=wanted.known, run_name=wanted.name)
    if wanted.known is None:  # parameters cannot be changed
        mlflow.log_params(wanted.settings)
    return OpenRun(run.info.run_id, mlflow.log_metrics, mlflow.end_run)


def _open_trackio(wanted: _Wanted) -> OpenRun:
    trackio = importlib.import_module("trackio")
    run = trackio.init(wanted.project, name=wanted.name, resume="allow", config=wanted.settings)
    return OpenRun(wanted.name, run.log, run.finish, trackio.Image)


def _open_swanlab(wanted: _Wanted) -> OpenRun:
    swanlab = importlib.import_module("swanlab")
    identity = wanted.identity
    run = swanlab.init(
        project=wanted.project, experiment_name=wanted.name, id=identity, resume="allow",
        logdir=str(wanted.folder / "swanlab"), config=wanted.settings,
    )  # fmt: skip
    return OpenRun(identity, run.log, run.finish, swanlab.Image)


def _open_comet(wanted: _Wanted) -> OpenRun:
    comet = importlib.import_module("comet_ml")
    identity = wanted.identity
    named = comet.ExperimentConfig(name=wanted.name)
    run = comet.start(project_name=wanted.project, experiment_key=identity, experiment_config=named)
    run.log_parameters(wanted.settings)
    return OpenRun(identity, lambda values, step: run.log_metrics(values, step=step), run.end)


def _open_tensorboard(wanted: _Wanted) -> OpenRun:
    """Open an event file; TensorBoard hides the steps of earlier files that this run repeats."""
    from torch.utils.tensorboard import SummaryWriter, summary  # costs a second

    folder = wanted.folder / "tensorboard" / (re.sub(r"[^\w.-]+", "-", wanted.name).lstrip(".") or "run")
    writer = SummaryWriter(str(folder), purge_step=wanted.first_step + 1)
    writer.add_custom_scalars(CHARTS)
    text = yaml.safe_dump(wanted.settings, sort_keys=False, allow_unicode=True)
    writer.add_text("configuration", textwrap.indent(text, "    "))  # in Markdown, four spaces make code
    # `add_hparams` would show them as a run of their own, in a folder below.
    for part in summary.hparams(wanted.settings, {"eval/loss": 0.0, "train/loss": 0.0}):
        writer.file_writer.add_summary(part)  # type: ignore[attr-defined]  # torch declares it as None

    def log(values: dict[str, Any], step: int) -> None:
        for tag, value in (values | {ON_TOP[tag]: values[tag] for tag in ON_TOP if tag in values}).items():
            if isinstance(value, np.ndarray):
                writer.add_image(tag, value, step, dataformats="HWC")
            else:
                writer.add_scalar(tag, value, step)
        writer.flush()

    return OpenRun("", log, writer.close, lambda image: np.asarray(image.convert("RGB")))


_OPEN: dict[str, Callable[[_Wanted], OpenRun]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
    "swanlab": _open_swanlab,
    "comet_ml": _open_comet,
}
