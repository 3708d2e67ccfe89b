"""`python -m trainer.commands.evaluate RUN`: held-out loss of the base with and without the adapter, with intervals.

Loss = sum of token losses / number of target tokens, in nats, over all documents. Intervals are percentile bootstraps
(Efron, 1979) over documents, since the tokens of a document are not independent: documents are drawn with replacement,
and the loss is computed from the drawn ones. Base and adapter use the same draws, so the interval of their difference
is that of a paired comparison.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from trainer.checkpoint.finished_run import (
    BASE_MODEL_HELP,
    FinishedRun,
    add_run_arguments,
    default_device,
    find_run,
    load_trained,
    quiet_libraries,
    refuse_reward_model,
    run_command,
    saved_tokenizer,
)
from trainer.checkpoint.identity import check_held_out
from trainer.commands.image_adapter import refuse_images
from trainer.config import CommandParser, SourceSection, UserError
from trainer.config.command_line import positive_int
from trainer.contract.output_files import check_result_file
from trainer.data import Sample, Samples, prepare_data
from trainer.data.batches import MicroBatch, collate
from trainer.data.samples import split_documents
from trainer.data.source_files import named_source
from trainer.model.adapter_scale import AUTO, SCALES, best_scale, cross_validated_losses, parse_scale, scaled_adapter
from trainer.model.base import context_length, load_model_config
from trainer.parallel.engine.deepspeed_engine import resolve_precision
from trainer.patches.loss_head import TokenLoss

CONFIDENCE = 0.95
FEW_DOCUMENTS = 30
Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A loss in nats per token and the bounds of its bootstrap interval."""

    loss: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Return loss (nats), bits per token and perplexity, each with its interval.

        For a difference of losses, `perplexity` is the ratio of perplexities; see `Evaluation.to_dict`.
        """
        ends = [self.low, self.high]
        return {
            "loss": self.loss,
            "loss_interval": ends,
            "bits_per_token": self.loss / math.log(2),
            "bits_per_token_interval": [end / math.log(2) for end in ends],
            "perplexity": _exp(self.loss),
            "perplexity_interval": [_exp(end) for end in ends],
        }


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; `difference` is adapter minus base."""

    documents: int
    target_tokens: int
    base: Estimate
    adapter: Estimate
    difference: Estimate
    scale: float = 1.0
    """Factor of the adapter's update."""

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON; `difference` has perplexity_ratio = perplexity of adapter / perplexity of base."""
        difference = {
            name.replace("perplexity", "perplexity_ratio"): value for name, value in self.difference.to_dict().items()
        }
        return {
            "documents": self.documents,
            "target_tokens": self.target_tokens,
            "scale": self.scale,
            "base": self.base.to_dict(),
            "adapter": self.adapter.to_dict(),
            "difference": difference,
        }


def evaluate(
    model: Any,
    documents: Sequence[Sample],
    pad_token_id: int,
    *,
    batch_size: int,
    resamples: int,
    seed: int,
    scale: float | str = 1.0,
) -> Evaluation:
    """Measure a PEFT model with and without its adapter on the same documents.

    `scale` is the factor of the adapter's update. With `auto`, each half of the documents is measured at the scale
    that is best on the other half, and the returned scale is the best on all.
    """
    factors = SCALES if isinstance(scale, str) else (scale,)
    console = Console(stderr=True)
    # Without a terminal, a transient bar would leave an empty line.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("evaluating", total=(1 + len(factors)) * len(documents))
        rows = []
        for factor in (0.0, *factors):
            done: list[tuple[int, float]] = []
            with scaled_adapter(model, factor):
                for part in _document_losses(model, documents, pad_token_id, batch_size, with_adapter=factor > 0):
                    done += part
                    progress.advance(bar, len(part))
            rows.append(np.array([loss for _, loss in sorted(done)]))
    # The first token of a document is not predicted.
    tokens = np.array([sum(weight > 0 for weight in document.trained[1:]) for document in documents], dtype=np.float64)
    scaled_FD = np.stack(rows[1:])
    evaluation = bootstrap(rows[0], cross_validated_losses(scaled_FD), tokens, resamples=resamples, seed=seed)
    return replace(evaluation, scale=factors[best_scale(scaled_FD)])


def bootstrap(base: Losses, adapter: Losses, tokens: Losses, *, resamples: int, seed: int) -> Evaluation:
    """Return token-weighted losses with 95 % intervals from each document's loss sum and number of target tokens."""
    generator = np.random.default_rng(seed)
    draws = np.empty((3, resamples))
    for index in range(resamples):
        drawn = generator.integers(len(tokens), size=len(tokens))
        count = tokens[drawn].sum()
        before, after = base[drawn].sum() / count, adapter[drawn].sum() / count
        draws[:, index] = before, after, after - before
    tail = (1 - CONFIDENCE) / 2
    bounds = np.quantile(draws, [tail, 1 - tail], axis=1)
    total = tokens.sum()
    means = (base.sum() / total, adapter.sum() / total, (adapter.sum() - base.sum()) / total)
    estimates = [Estimate(float(mean), float(low), float(high)) for mean, low, high in zip(means, *bounds, strict=True)]
    return Evaluation(len(tokens), int(total), estimates[0], estimates[1], estimates[2])


def held_out_documents(run: FinishedRun, tokenizer: Any, data: str | None, split: str | None) -> list[Sample]:
    """Return the documents that the run held out, or all of `data`, read with the run's settings.

    Raises UserError if the run held nothing out and no data is given.
    """
    section = run.config.dataset
    source = section.evaluation
    if data is not None:
        shaped = source or (section.mix[0] if section.mix else section)
        kept = {name: getattr(shaped, name) for name in ("format", "fields", "template")}
        source = named_source(data, "--data", split=split or "train", **kept)
    elif split is not None:
        raise UserError(f"--split={split}: needs --data")
    elif source is None and not section.val_split:
        raise UserError(f"{run.folder}: the run held no data out; pass some with --data FILE")
    if source is not None:
        alone = {"mix": (), "evaluation": None, "val_split": 0.0, "packing": False, "streaming": False}
        fields = {name: getattr(source, name) for name in SourceSection.model_fields}
        section = section.model_copy(update=alone | fields)
    try:
        prepared = prepare_data(
            section,
            tokenizer,
            seed=run.config.seed,
            cache_dir=Path(section.cache_dir).expanduser(),
            max_length_of_model=context_length(load_model_config(run.config.base_model, run.config.model)),
        )
    except UserError as error:
        if data is None:
            raise
        named = str(error).replace("dataset.split=", "--split=").replace("dataset.path=", "--data=")
        raise UserError(named) from None
    if source is None and not run.allow_mismatch:
        check_held_out(run.config, run.folder, prepared.origin)
    if (prepared.stats.evaluation or prepared.stats).pairs:
        raise UserError(
            f"{run.folder}: the data has pairs of answers, which eval does not measure; see eval/rewards in "
            f"{run.folder}/metrics.jsonl, or pass texts or conversations with --data"
        )
    samples = prepared.evaluation if source is None else prepared.train
    assert isinstance(samples, Samples)  # streams have no val_split
    return [document for sample in samples for document in split_documents(sample)]


def _document_losses(
    model: Any, documents: Sequence[Sample], pad_token_id: int, batch_size: int, *, with_adapter: bool
) -> Iterator[list[tuple[int, float]]]:
    """Yield batches of (document index, sum of token losses), with documents of similar length in a batch."""
    order = sorted(range(len(documents)), key=lambda index: -len(documents[index].input_ids))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate([documents[index] for index in chosen], pad_token_id, packed=False, flat=False)
        if with_adapter:
            sums = row_losses(model, batch)
        else:
            with model.disable_adapter():
                sums = row_losses(model, batch)
        yield list(zip(chosen, sums.tolist(), strict=True))


@torch.no_grad()
def row_losses(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the sum of token losses of each row of a micro-batch (nats, fp64, [B])."""
    return TokenLoss(model).by_row(model, batch, model.device)


def show(evaluation: Evaluation, heading: str, console: Console) -> None:
    """Print the results as a table with intervals below the values."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("loss (nats/token)", "bits/token", "perplexity"):
        table.add_column(name, justify="right")
    for name, estimate in (("base", evaluation.base), ("base + adapter", evaluation.adapter)):
        table.add_row(name, *_cells(estimate, (".4f", ".4f", ",.2f")))
    loss, bits, ratio = _cells(evaluation.difference, ("+.4f", "+.4f", ".3f"))
    table.add_row("difference", loss, bits, f"x {ratio}")
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"[dim]below: {CONFIDENCE:.0%} intervals of a bootstrap over documents[/dim]", highlight=False)
    if evaluation.documents < FEW_DOCUMENTS:
        console.print(f"[yellow]only {evaluation.documents} documents: the intervals are rough[/yellow]")


def _cells(estimate: Estimate, forms: Sequence[str]) -> list[str]:
    values = estimate.to_dict()
    cells = []
    for name, form in zip(("loss", "bits_per_token", "perplexity"), forms, strict=True):
        low, high = values[f"{name}_interval"]
        cells.append(f"{values[name]:{form}}\n[dim]{low:{form}} to {high:{form}}[/dim]")
    return cells


def _exp(nats: float) -> float:
    """Return exp, or infinity on overflow, which an untrained base may reach."""
    return math.exp(nats) if nats < 700 else math.inf


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora eval", description="Loss, bits per token and perplexity of base and adapter on held-out data."
    )
    add_run_arguments(parser, BASE_MODEL_HELP)
    parser.add_argument(
        "--data", metavar="FILE", help="a file, folder or hub name to evaluate on instead of the run's held-out data"
    )
    parser.add_argument("--split", help="split of --data (train)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="documents per batch (as in training)")
    parser.add_argument("--samples", type=positive_int, default=2000, metavar="B", help="bootstrap resamples (2000)")
    parser.add_argument(
        "--scale", type=parse_scale, default=1.0, metavar="X", help="factor of the adapter's update, or auto (1)"
    )
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        check_result_file(arguments.json, f"--json={arguments.json}", {"run", "confidence", "resamples"})
    run = find_run(arguments.run, arguments.base_model, allow_mismatch=arguments.allow_mismatch)
    refuse_images(run, "its held-out loss is in metrics.jsonl")
    refuse_reward_model(run, "its held-out loss and rewards are in metrics.jsonl")
    config = run.config
    tokenizer = saved_tokenizer(run)
    documents = held_out_documents(run, tokenizer, arguments.data, arguments.split)
    device = default_device()
    model = load_trained(run, tokenizer, device)
    batch_size = arguments.batch_size or config.training.eval_batch_size or config.training.batch_size
    evaluation = evaluate(
        model,
        documents,
        tokenizer.pad_token_id,
        batch_size=batch_size,
        resamples=arguments.samples,
        seed=config.seed,
        scale=arguments.scale,
    )
    precision = resolve_precision(config.training.precision, device)
    if config.adapter == "qlora":
        precision = f"{config.quantization.quant_type} ({precision})"
    elif config.training.qat:
        precision = f"{precision}, merged weights in {config.training.qat}"
    size = f"{evaluation.documents:,} documents, {evaluation.target_tokens:,} target tokens"
    show(evaluation, f"{config.base_model}, {precision} on {device.type}; {size}", Console())
    if arguments.scale == AUTO:
        print(f"best scale {evaluation.scale:g}; each half of the documents measured at the best scale of the other")
        print(f"zerolora merge {arguments.run} --scale {evaluation.scale:g}")
    if arguments.json is not None:
        record = {
            "run": str(arguments.run),
            "base_model": config.base_model,
            "data": arguments.data or "held out by the run",
            "precision": precision,
            "device": device.type,
            "confidence": CONFIDENCE,
            "resamples": arguments.samples,
            "seed": config.seed,
            **evaluation.to_dict(),
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after one line on stderr."""
    arguments = _parse(argv)
    quiet_libraries()
    return run_command(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
