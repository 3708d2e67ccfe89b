"""One run of a comparison, a single rank without a launcher; trainer/compare/trial.py starts it.

It trains as any other run does. Also, every evaluation keeps the loss of each held-out document, which intervals and
paired differences need; they are written at the end, to heldout_documents.json, which marks the run as finished. What a
comparison has no use for is left out: checkpoints (an interrupted run starts again) and the report of the run.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

from rich.markup import escape

from trainer.checkpoint.run_record import note_written
from trainer.commands.evaluate import row_losses
from trainer.config import CommandParser, LoadedConfig, UserError, load_config
from trainer.contract.folder_lock import FolderLock
from trainer.contract.whole_files import write_json
from trainer.data import Samples
from trainer.data.batches import collate
from trainer.data.prepared import Prepared
from trainer.loop import Position
from trainer.monitor.console import open_console
from trainer.monitor.metrics import read_metrics
from trainer.preflight import prepare
from trainer.ranks.group import Ranks, leave_process_group
from trainer.ranks.signals import StopRequest
from trainer.run import Run

DOCUMENTS_FILE = "heldout_documents.json"


def main(argv: list[str] | None = None) -> int:
    """Train; exit code 0 done, 1 failed, 2 usage, 128 + signal when stopped."""
    parser = CommandParser(prog="trainer.compare.run", description="One run of `zerolora compare`.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args(argv)
    try:
        loaded = load_config(arguments.config, arguments.overrides)
        prepared = prepare(loaded.config)
        folder = Path(loaded.config.output_dir)
        lock = FolderLock.take(folder, resumes=False, say=lambda line: print(line, file=sys.stderr))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with lock:
        return _train(loaded, prepared, lock)


def _train(loaded: LoadedConfig, prepared: Prepared, lock: FolderLock) -> int:
    """Train in a folder that is held; the exit code."""
    try:
        run = MeasuredRun(loaded, prepared, lock)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        run.train()
    except UserError as error:
        run.close()
        run.say(f"error: {escape(str(error))}")
        return error.exit_code
    except Exception as error:  # not swallowed: traceback in the log, one line shown, exit code 1
        traceback.print_exc()
        run.close()
        run.say(f"error: {escape(f'{type(error).__name__}: {error}')}")
        return 1
    if not run.stop:
        run.write_documents()
    leave_process_group()
    return run.stop.exit_code if run.stop else 0


class MeasuredRun(Run):
    """A run whose evaluations keep the sum of token losses of every held-out document, nats, at every evaluation."""

    def __init__(self, loaded: LoadedConfig, prepared: Prepared, lock: FolderLock) -> None:
        samples = prepared.data.evaluation
        if not isinstance(samples, Samples) or samples.packed:
            raise UserError("dataset.packing=true: documents are measured one by one here; use dataset.packing: false")
        self.documents = [samples[index] for index in range(len(samples))]
        self.document_losses: list[list[float]] = []
        console = open_console(Path(loaded.config.output_dir), 0, None)
        super().__init__(loaded, prepared, Ranks(0, 1, 0), console, StopRequest(), lock)

    def _evaluate(self, engine: Any) -> tuple[float, int]:
        training, documents = self.config.training, self.documents
        size = training.eval_batch_size or training.batch_size
        losses = [0.0] * len(documents)
        # Documents of like length share a batch, which spares padding.
        order = sorted(range(len(documents)), key=lambda index: len(documents[index].input_ids))
        engine.eval()
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            pad = self.prepared.tokenizer.pad_token_id
            batch = collate([documents[index] for index in chosen], pad, packed=False, flat=False)
            for index, loss in zip(chosen, row_losses(engine.module, batch).tolist(), strict=True):
                losses[index] = loss
        engine.train()
        self.document_losses.append(losses)
        tokens = sum(self._target_tokens())
        return sum(losses) / tokens, tokens

    def _target_tokens(self) -> list[int]:
        # Nothing comes before the first token to predict it from.
        return [sum(document.trained[1:]) for document in self.documents]

    def _save_checkpoint(self, engine: Any, position: Position) -> None:
        """None: a run of minutes that was interrupted starts again."""

    def _end(self, position: Position, before: float | None, after: float | None) -> None:
        self.close()
        self.say(f"stopped at step {position.step}" if self.stop else f"done at step {position.step}: {after:.4f}")

    def write_documents(self) -> None:
        """Write heldout_documents.json: target tokens of each document, and its loss sums at each evaluation's step."""
        steps = [record["step"] for record in read_metrics(self.run_dir) if "eval/loss" in record]
        record = {
            "data": self.prepared.data.fingerprint,
            "target_tokens": self._target_tokens(),
            "training_target_tokens": self.prepared.data.stats.target_tokens,
            "evaluations": [
                {"step": step, "loss_sums": losses} for step, losses in zip(steps, self.document_losses, strict=True)
            ],
        }
        self._check_folder()
        note_written(self.run_dir, [DOCUMENTS_FILE])
        write_json(self.run_dir / DOCUMENTS_FILE, record)
