"""One run of a comparison, a single rank without a launcher; trainer/compare/trial.py starts it.

It trains as any other run does. Also, every evaluation keeps the loss of each held-out document, which intervals and
paired differences need; they are written at the end, to heldout_documents.json, which marks the run as finished. What a
comparison has no use for is left out: checkpoints (an interrupted run starts again) and the report of the run.
"""

import sys
import traceback
from pathlib import Path

from rich.markup import escape

from trainer.checkpoint.run_record import note_written
from trainer.commands.evaluate import row_losses
from trainer.config import CommandParser, LoadedConfig, TrainingSection, UserError, load_config
from trainer.contract.folder_lock import FolderLock
from trainer.contract.whole_files import write_json
from trainer.data import Samples
from trainer.data.batches import collate
from trainer.data.prepared import Prepared
from trainer.engine.protocol import Engine
from trainer.monitor.console import open_console
from trainer.monitor.metrics import read_metrics
from trainer.preflight import prepare
from trainer.ranks.group import Ranks, leave_process_group
from trainer.ranks.signals import StopRequest
from trainer.run import Measurement, Run

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
    folder = Path(loaded.config.output_dir)
    try:
        held_out = HeldOutDocuments(loaded.config.training, prepared)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    stop = StopRequest()
    console = open_console(folder, 0, None)
    run = Run(loaded, prepared, Ranks(0, 1, 0), console, stop, lock, Measurement(held_out.evaluate))
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
    if not stop:
        run.folder.check()
        held_out.write(folder)
    leave_process_group()
    return stop.exit_code if stop else 0


class HeldOutDocuments:
    """The held-out documents of a run, and the sum of token losses of each, nats, at every evaluation."""

    def __init__(self, training: TrainingSection, prepared: Prepared) -> None:
        samples = prepared.data.evaluation
        if not isinstance(samples, Samples) or samples.packed:
            raise UserError("dataset.packing=true: documents are measured one by one here; use dataset.packing: false")
        self._prepared = prepared
        self._batch_size = training.eval_batch_size or training.batch_size
        self._documents = [samples[index] for index in range(len(samples))]
        # Nothing comes before the first token to predict it from.
        self._target_tokens = [sum(document.trained[1:]) for document in self._documents]
        self._losses: list[list[float]] = []

    def evaluate(self, engine: Engine) -> tuple[float, int]:
        """The mean over all target tokens, nats, and their number; the sum of each document is kept."""
        documents = self._documents
        losses = [0.0] * len(documents)
        # Documents of like length share a batch, which spares padding.
        order = sorted(range(len(documents)), key=lambda index: len(documents[index].input_ids))
        pad = self._prepared.tokenizer.pad_token_id
        engine.eval()
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            batch = collate([documents[index] for index in chosen], pad, packed=False, flat=False)
            for index, loss in zip(chosen, row_losses(engine.module, batch).tolist(), strict=True):
                losses[index] = loss
        engine.train()
        self._losses.append(losses)
        tokens = sum(self._target_tokens)
        return sum(losses) / tokens, tokens

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
        }
        note_written(run_dir, [DOCUMENTS_FILE])
        write_json(run_dir / DOCUMENTS_FILE, record)
