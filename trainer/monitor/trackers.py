"""Log metrics to TensorBoard and tracking services (`logging.report_to`), on rank 0."""

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
"""File with the run's ID in each service, so that a resumed run continues there."""
# TensorBoard sorts groups by name, capital letters first, so these tags come before eval/bpt.
TOP_TAGS = {"train/loss": "Loss/training", "eval/loss": "Loss/held out"}
CHARTS = {"Loss": {"training and held out": ["Multiline", ["train/loss", "eval/loss"]]}}
LogFunction = Callable[[dict[str, Any], int], object]


@dataclass(frozen=True)
class OpenRun:
    run_id: str
    """The run's ID; empty if the service needs no ID."""
    log: LogFunction
    """Function that logs values for a step."""
    finish: Callable[[], object]
    wrap_image: Callable[[Any], Any] | None = None
    """Function that converts a PIL image to a value for `log`; None if the service logs no images."""


@dataclass(frozen=True)
class _RunRequest:
    project: str
    name: str
    folder: Path
    resumed_id: str | None
    """ID of the run in the service, if the run is resumed."""
    settings: dict[str, Any]
    first_step: int

    @property
    def run_id(self) -> str:
        return self.resumed_id or secrets.token_hex(16)


class Trackers:
    def __init__(
        self,
        logging: LoggingSection,
        run_dir: Path,
        settings: Mapping[str, Any],
        log: Callable[[str], None],
        completed_steps: int,
    ) -> None:
        """Open a run in each service, or resume the run in `run_dir`; `settings` are logged as hyperparameters.

        `completed_steps` is the number of steps completed before this run was started or resumed.
        """
        self._log, path = log, run_dir / IDENTITY_FILE
        name = logging.run_name or run_dir.resolve().name
        hyperparameters = {
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in flatten(settings).items()
        }
        recorded_ids = read_json(path) if path.is_file() else {}
        self._open = {
            service: _OPENERS[service](
                _RunRequest(logging.project, name, run_dir, recorded_ids.get(service), hyperparameters, completed_steps)
            )
            for service in logging.report_to
        }
        if run_ids := {service: run.run_id for service, run in self._open.items() if run.run_id}:
            write_json(path, recorded_ids | run_ids)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, run in [*self._open.items()]:
            self._call_service(name, run.log, dict(values), step)

    def log_image(self, step: int, title: str, image: Any) -> None:
        for name, run in [*self._open.items()]:
            if run.wrap_image is not None:
                self._call_service(name, run.log, {title: run.wrap_image(image)}, step)

    def close(self) -> None:
        """Finish all runs; may be called twice."""
        for name, run in [*self._open.items()]:
            self._call_service(name, run.finish)
        self._open.clear()

    def _call_service(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function of a service; after an error, warn and stop using the service."""
        try:
            call(*arguments)
        except Exception as error:  # services and networks raise many types of errors
            del self._open[name]
            problem = escape(f"{type(error).__name__}: {error}")
            self._log(f"[yellow]warning:[/yellow] {name}: logging stopped: {problem}")


def _open_wandb(request: _RunRequest) -> OpenRun:
    wandb = importlib.import_module("wandb")
    run_id = request.run_id
    # console=off: otherwise wandb would intercept the output to the log.
    run = wandb.init(
        project=request.project, name=request.name, id=run_id, resume="allow", dir=str(request.folder),
        settings=wandb.Settings(console="off"), config=request.settings,
    )  # fmt: skip
    # An explicit step axis: wandb's internal step cannot go back after a resume.
    run.define_metric("*", step_metric="step")
    return OpenRun(run_id, lambda values, step: run.log({"step": step, **values}), run.finish, wandb.Image)


def _open_mlflow(request: _RunRequest) -> OpenRun:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(request.project)
    run = mlflow.start_run(run_id=request.resumed_id, run_name=request.name)
    if request.resumed_id is None:  # parameters are immutable
        mlflow.log_params(request.settings)
    return OpenRun(run.info.run_id, mlflow.log_metrics, mlflow.end_run)


def _open_trackio(request: _RunRequest) -> OpenRun:
    trackio = importlib.import_module("trackio")
    run = trackio.init(request.project, name=request.name, resume="allow", config=request.settings)
    return OpenRun(request.name, run.log, run.finish, trackio.Image)


def _open_swanlab(request: _RunRequest) -> OpenRun:
    swanlab = importlib.import_module("swanlab")
    run_id = request.run_id
    run = swanlab.init(
        project=request.project, experiment_name=request.name, id=run_id, resume="allow",
        logdir=str(request.folder / "swanlab"), config=request.settings,
    )  # fmt: skip
    return OpenRun(run_id, run.log, run.finish, swanlab.Image)


def _open_comet(request: _RunRequest) -> OpenRun:
    comet = importlib.import_module("comet_ml")
    run_id = request.run_id
    experiment = comet.ExperimentConfig(name=request.name)
    run = comet.start(project_name=request.project, experiment_key=run_id, experiment_config=experiment)
    run.log_parameters(request.settings)
    return OpenRun(run_id, lambda values, step: run.log_metrics(values, step=step), run.end)


def _open_tensorboard(request: _RunRequest) -> OpenRun:
    """Open an event file, with `purge_step` set so that TensorBoard hides steps that a resumed run logs again."""
    from torch.utils.tensorboard import SummaryWriter, summary  # takes a second to import

    folder = request.folder / "tensorboard" / (re.sub(r"[^\w.-]+", "-", request.name).lstrip(".") or "run")
    writer = SummaryWriter(str(folder), purge_step=request.first_step + 1)
    writer.add_custom_scalars(CHARTS)
    text = yaml.safe_dump(request.settings, sort_keys=False, allow_unicode=True)
    writer.add_text("configuration", textwrap.indent(text, "    "))  # four spaces mark code in Markdown
    # `add_hparams` would write them to a separate run in a subfolder.
    for part in summary.hparams(request.settings, {"eval/loss": 0.0, "train/loss": 0.0}):
        writer.file_writer.add_summary(part)  # type: ignore[attr-defined]  # torch declares it as None

    def log(values: dict[str, Any], step: int) -> None:
        for tag, value in (values | {TOP_TAGS[tag]: values[tag] for tag in TOP_TAGS if tag in values}).items():
            if isinstance(value, np.ndarray):
                writer.add_image(tag, value, step, dataformats="HWC")
            else:
                writer.add_scalar(tag, value, step)
        writer.flush()

    return OpenRun("", log, writer.close, lambda image: np.asarray(image.convert("RGB")))


_OPENERS: dict[str, Callable[[_RunRequest], OpenRun]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
    "swanlab": _open_swanlab,
    "comet_ml": _open_comet,
}
