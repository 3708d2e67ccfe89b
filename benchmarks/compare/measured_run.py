"""One run of a comparison: a single rank without a launcher, started by benchmarks/compare/trial.py.

It trains like any other run, but every evaluation also keeps the loss of each held-out document, for intervals and
paired differences; they are written at the end to heldout_documents.json, which marks the run as finished. Checkpoints
(an interrupted run starts again) and the report of the run are left out.
"""

import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from trainer.commands.evaluate import compute_row_losses
from trainer.config import CommandParser, LoadedConfig, RunConfig, UserError, load_config
from trainer.contract.folder_lock import FolderLock
from trainer.contract.whole_files import write_json
from trainer.data.batches import IGNORE_INDEX, MicroBatch, collate_samples
from trainer.data.cache import prepare_reference
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Sample, Samples
from trainer.evaluation import Evaluation
from trainer.model.adapter import changes_base_weights
from trainer.model.saved_adapter import scale_adapter_temporarily
from trainer.monitor.console import open_console
from trainer.monitor.metrics import read_metrics
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, leave_process_group
from trainer.parallel.ranks.signals import StopRequest
from trainer.patches.loss_head import TokenLoss, bypass_adapter
from trainer.run import Run
from trainer.setup.preflight import prepare
from trainer.tasks.task import Task

DOCUMENTS_FILE = "heldout_documents.json"
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Parts of an update from which the best is chosen."""


def main(argv: list[str] | None = None) -> int:
    """Train; return exit code 0 if done, 1 if failed, 2 for usage errors, 128 + signal when stopped."""
    parser = CommandParser(prog="benchmarks.compare.measured_run", description="One run of `zerolora compare`.")
    parser.add_config()
    parser.add_argument("--forgetting", metavar="FILE", help="text on which to measure the distance from the base")
    arguments = parser.parse_intermixed_args(argv)
    try:
        loaded = load_config(arguments.config, arguments.overrides)
        prepared = prepare(loaded.config)
        texts = _texts(loaded.config, prepared.tokenizer, arguments.forgetting)
        folder = Path(loaded.config.output_dir)
        lock = FolderLock.acquire(folder, resumes=False, log=lambda line: print(line, file=sys.stderr))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with lock:
        return _train(loaded, prepared, lock, texts)


def _train(loaded: LoadedConfig, prepared: PreparedRun, lock: FolderLock, texts: list[Sample]) -> int:
    """Train in a locked folder; return the exit code."""
    folder = Path(loaded.config.output_dir)
    try:
        held_out = HeldOutDocuments(loaded.config, prepared, texts)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    stop = StopRequest()
    console = open_console(folder, 0, None)
    run = MeasuredRun(loaded, prepared, Ranks(0, 1, 0), console, stop, lock)
    run.measure(held_out.evaluate, held_out.measure_scales)
    try:
        run.train()
    except UserError as error:
        run.close()
        run.log(f"error: {escape(str(error))}")
        return error.exit_code
    except Exception as error:  # traceback in the log, one line shown, exit code 1
        traceback.print_exc()
        run.close()
        run.log(f"error: {escape(f'{type(error).__name__}: {error}')}")
        return 1
    if not stop:
        run.folder.check_lock()
        held_out.write(folder)
    leave_process_group()
    return stop.exit_code if stop else 0


Measure = Callable[[Engine], float]
"""Returns the held-out loss of the engine's model, in nats per target token."""


class MeasuredEvaluation(Evaluation):
    """An evaluation with a held-out loss of its own."""

    def __init__(self, measure: Measure, task: Task, engine: Engine, *others: Any, **options: Any) -> None:
        super().__init__(task, engine, *others, **options)
        self._measure_loss = partial(measure, engine)

    def compute_held_out_loss(self) -> float:
        return self._measure_loss()


class MeasuredRun(Run):
    """A run that only measures held-out losses, without checkpoints and report."""

    has_checkpoints = False

    def measure(self, evaluate: Measure, at_the_end: Callable[[Engine], None]) -> None:
        """Evaluate by `evaluate`; `at_the_end` gets the trained model."""
        self.build_evaluation, self._at_the_end = partial(MeasuredEvaluation, evaluate), at_the_end

    def _save_result(self, engine: Engine, factor: float) -> None:
        super()._save_result(engine, factor)
        self._at_the_end(engine)

    def finish(self) -> None:
        if self.folder.metrics is not None:
            self.folder.metrics.close()
        found = f": {self._loss_after:.4f}" if self._loss_after is not None else ""
        self.log(f"{'stopped' if self._stopped else 'done'} at step {self.position.step}{found}")


class HeldOutDocuments:
    """The held-out documents of a run, and the sum of token losses of each, nats, at every evaluation.

    `texts`: also measured each time, with losses and KL(adapter || base).
    """

    def __init__(self, config: RunConfig, prepared: PreparedRun, texts: list[Sample]) -> None:
        samples = prepared.data.evaluation
        if not isinstance(samples, Samples) or samples.packed:
            raise UserError("dataset.packing=true: documents are measured one by one; set dataset.packing: false")
        self._config, self._prepared, self._texts = config, prepared, texts
        self._documents = [samples[index] for index in range(len(samples))]
        self._target_tokens = _target_counts(self._documents)
        self._losses: list[list[float]] = []
        self._scaled: list[list[float]] = []
        self._text_losses: list[list[float]] = []
        self._text_divergences: list[list[float]] = []

    def evaluate(self, engine: Engine) -> float:
        """Return the mean over all target tokens, nats; keep the sum of each document."""
        engine.eval()
        losses = self._measure(engine, self._documents, compute_row_losses)
        if self._texts:
            self._text_losses.append(self._measure(engine, self._texts, compute_row_losses))
            self._text_divergences.append(self._measure(engine, self._texts, compute_row_divergences))
        engine.train()
        self._losses.append(losses)
        return sum(losses) / sum(self._target_tokens)

    def measure_scales(self, engine: Engine) -> None:
        """Measure the finished adapter at smaller scales, which only shrinks the update of the base."""
        if changes_base_weights(self._config.lora):
            return
        engine.eval()
        for factor in SCALES:
            with scale_adapter_temporarily(engine.module, factor):
                self._scaled.append(self._measure(engine, self._documents, compute_row_losses))
        engine.train()

    def _measure(
        self, engine: Engine, documents: list[Sample], measure: Callable[[Any, MicroBatch], torch.Tensor]
    ) -> list[float]:
        training, pad = self._config.training, self._prepared.tokenizer.pad_token_id
        size = training.eval_batch_size or training.batch_size
        values = [0.0] * len(documents)
        # Batch documents of similar length to save padding.
        order = sorted(range(len(documents)), key=lambda index: len(documents[index].input_ids))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = collate_samples([documents[index] for index in chosen], pad, packed=False, flat=False)
            for index, value in zip(chosen, measure(engine.module, batch).tolist(), strict=True):
                values[index] = value
        return values

    def write(self, run_dir: Path) -> None:
        """Write heldout_documents.json: target tokens of each document, and its loss sums at each evaluation's step."""
        steps = [record["step"] for record in read_metrics(run_dir) if "eval/loss" in record]
        record = {
            "data": self._prepared.data.fingerprint,
            "target_tokens": self._target_tokens,
            "training_target_tokens": self._prepared.data.stats.target_tokens,
            "evaluations": [
                {"step": step, "loss_sums": losses} for step, losses in zip(steps, self._losses, strict=True)
            ],
            "scaled": [
                {"factor": factor, "loss_sums": losses} for factor, losses in zip(SCALES, self._scaled, strict=False)
            ],
            "text_tokens": _target_counts(self._texts),
            "texts": [
                {"step": step, "loss_sums": losses, "kl_sums": divergences}
                for step, losses, divergences in zip(steps, self._text_losses, self._text_divergences, strict=False)
            ],
        }
        write_json(run_dir / DOCUMENTS_FILE, record)


def _texts(config: RunConfig, tokenizer: Any, path: str | None) -> list[Sample]:
    if path is None:
        return []
    samples = prepare_reference(config.dataset, tokenizer, path, setting="--forgetting", seed=config.seed)
    return [samples[index] for index in range(len(samples))]


def _target_counts(documents: list[Sample]) -> list[int]:
    # The first token cannot be predicted.
    return [sum(weight > 0 for weight in document.loss_weights[1:]) for document in documents]


@torch.no_grad()
def compute_row_divergences(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the sum over targets of KL(adapter || base) of each row of a micro-batch, nats, fp64 [B]."""
    loss = TokenLoss(model)
    adapted, targets = loss.compute_logits(model, batch, model.device)
    with bypass_adapter(model):
        base, _ = loss.compute_logits(model, batch, model.device)
    rows = []
    for one, other, target in zip(adapted, base, targets, strict=True):
        log_p, log_q = one.float().log_softmax(-1), other.float().log_softmax(-1)
        rows.append(((log_p.exp() * (log_p - log_q)).sum(-1) * (target != IGNORE_INDEX)).sum())
    return torch.stack(rows).double()
