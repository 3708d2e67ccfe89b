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
from contextlib import nullcontext
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
from trainer.config import CommandParser, RunConfig, SourceSection, UserError
from trainer.config.command_line import positive_int
from trainer.config.errors import shown
from trainer.config.evaluation_section import EvaluationSection
from trainer.contract.output_files import check_result_file
from trainer.data import Sample, Samples, prepare_data
from trainer.data.batches import MicroBatch, PairBatch, collate
from trainer.data.samples import split_documents
from trainer.data.source_files import build_source
from trainer.model.adapter_scale import AUTO, SCALES, best_scale, cross_validated_losses, parse_scale, scaled_adapter
from trainer.model.base import context_length, load_model_config
from trainer.parallel.engine.deepspeed_engine import resolve_precision
from trainer.parallel.ranks.group import Ranks
from trainer.patches.loss_head import TokenLoss
from trainer.setup.preflight import check_pairs
from trainer.tasks.lm_eval_scores import TaskScores
from trainer.tasks.preference import PreferenceLoss
from trainer.tasks.reward import RewardLoss

CONFIDENCE = 0.95
FEW_DOCUMENTS = 30
COLUMNS = {
    "documents": {
        "loss": ("loss (nats/token)", ".4f"), "bits_per_token": ("bits/token", ".4f"),
        "perplexity": ("perplexity", ",.2f"),
    },
    "pairs": {"loss": ("loss (nats/pair)", ".4f"), "accuracy": ("accuracy", ".1%"), "margin": ("reward margin", ".4f")},
}  # fmt: skip
"""Columns of the table, for texts and for pairs: the value's name -> title and format."""
Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A loss in nats per token and the bounds of its bootstrap interval."""

    loss: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, Any]:
        """Return the value and its interval for JSON, under `name`."""
        return {name: self.loss, f"{name}_interval": [self.low, self.high]}

    def to_dict(self) -> dict[str, Any]:
        """Return loss (nats), bits per token and perplexity, each with its interval.

        For a difference of losses, `perplexity` is the ratio of perplexities; see `Evaluation.to_dict`.
        """
        values = (self.loss, self.low, self.high)
        bits, perplexity = Estimate(*(value / math.log(2) for value in values)), Estimate(*map(_exp, values))
        return self.named("loss") | bits.named("bits_per_token") | perplexity.named("perplexity")


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


def evaluate_pairs(
    model: Any, samples: Samples, config: RunConfig, pad_token_id: int, *, batch_size: int, resamples: int
) -> dict[str, Any]:
    """Return loss, accuracy and margin of base, adapter and difference, each with its interval over pairs."""
    loss = RewardLoss(model, config.reward) if config.task == "reward" else _preference_loss(model, config)
    values = _measure_pairs(model, loss, samples, pad_token_id, batch_size)
    pairs = values.shape[-1]
    found: dict[str, Any] = {"pairs": pairs, "base": {}, "adapter": {}, "difference": {}}
    for name, base, adapter in zip(COLUMNS["pairs"], *values, strict=True):
        result = bootstrap(base, adapter, np.ones(pairs), resamples=resamples, seed=config.seed)
        for part in ("base", "adapter", "difference"):
            found[part] |= getattr(result, part).named(name)
    return found


def _preference_loss(model: Any, config: RunConfig) -> PreferenceLoss:
    """Return the loss of a preference run, with the reference computed next to the model's scores."""
    settings = config.preference
    if settings.reference == "cached":
        settings = settings.model_copy(update={"reference": "step"})
    return PreferenceLoss(model, settings)


@torch.no_grad()
def _measure_pairs(
    model: Any, loss: PreferenceLoss | RewardLoss, samples: Samples, pad_token_id: int, batch_size: int
) -> NDArray[np.float64]:
    """Return loss, accuracy and margin of every pair, of the base and with the adapter [2, 3, P]."""
    documents = [document for sample in samples for document in split_documents(sample)]
    margins = [margin for sample in samples for margin in sample.margins]
    parts: list[torch.Tensor] = []
    for start in range(0, len(documents) // 2, batch_size):
        batch = collate(
            documents[2 * start : 2 * (start + batch_size)], pad_token_id, packed=False, flat=False, pairs=True
        )
        assert isinstance(batch, PairBatch)
        batch = replace(batch, margins=torch.tensor(margins[start : start + batch_size]))  # split documents have none
        for without in (model.disable_adapter, nullcontext):
            with without():
                parts.append(loss.measure_pairs(model, batch, model.device).double())
    return torch.stack([torch.cat(parts[::2], 1), torch.cat(parts[1::2], 1)]).cpu().numpy()


def held_out_documents(run: FinishedRun, tokenizer: Any, data: str | None, split: str | None) -> list[Sample]:
    """Return the documents that the run held out, or all of `data`; see `held_out_samples`.

    Raises UserError for pairs of answers.
    """
    samples, has_pairs = held_out_samples(run, tokenizer, data, split)
    if has_pairs:
        raise UserError(f"{run.folder}: held-out data are pairs of answers; use zerolora eval {run.folder}")
    return [document for sample in samples for document in split_documents(sample)]


def held_out_samples(run: FinishedRun, tokenizer: Any, data: str | None, split: str | None) -> tuple[Samples, bool]:
    """Return the samples that the run held out, or all of `data`, and whether they are pairs of answers.

    They are read with the run's settings.
    Raises UserError if the run held nothing out and no data is given, and for data of another task.
    """
    section = run.config.dataset
    source = section.evaluation
    if data is not None:
        shaped = source or (section.mix[0] if section.mix else section)
        kept = {name: getattr(shaped, name) for name in ("format", "fields", "template")}
        source = build_source(data, "--data", split=split or "train", **kept)
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
    has_pairs = bool((prepared.stats.evaluation or prepared.stats).pairs)
    if has_pairs or run.config.task == "reward":
        check_pairs(run.config, prepared.stats)
    if has_pairs and run.config.task == "preference":
        _check_reference(run)
    samples = prepared.evaluation if source is None else prepared.train
    assert isinstance(samples, Samples)  # streams have no val_split
    return samples, has_pairs


def _check_reference(run: FinishedRun) -> None:
    """Raise UserError if the loss of a pair needs more than the model with and without its adapter."""
    metrics = f"see eval/rewards in {run.folder}/metrics.jsonl, or pass texts or conversations with --data"
    if "kto" in run.config.preference.loss:
        raise UserError(f"{run.folder}: preference.loss=kto compares answers of a whole batch; {metrics}")
    if run.config.preference.reference == "cached" and run.config.lora.adapter_path is not None:
        problem = "its reference is the adapter that training began with, which the run does not keep"
        raise UserError(f"{run.folder}: lora.adapter_path={run.config.lora.adapter_path}: {problem}; {metrics}")


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


def show(found: dict[str, Any], heading: str, console: Console) -> None:
    """Print the results, as they are written in JSON, in a table with intervals below the values."""
    unit = "pairs" if "pairs" in found else "documents"
    columns, table = COLUMNS[unit], Table(box=None, pad_edge=False)
    table.add_column("")
    for title, _ in columns.values():
        table.add_column(title, justify="right")
    for row, model in (("base", "base"), ("base + adapter", "adapter"), ("difference", "difference")):
        sign = "+" * (model == "difference")
        table.add_row(row, *(_cell(found[model], name, sign + form) for name, (_, form) in columns.items()))
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"[dim]below: {CONFIDENCE:.0%} bootstrap intervals over {unit}[/dim]", highlight=False)
    if found[unit] < FEW_DOCUMENTS:
        console.print(f"[yellow]only {found[unit]} {unit}: the intervals are rough[/yellow]")


def _cell(values: dict[str, Any], name: str, form: str) -> str:
    mark = ""
    if name not in values:
        name, form, mark = f"{name}_ratio", ".3f", "x "
    low, high = values[f"{name}_interval"]
    return f"{mark}{values[name]:{form}}\n[dim]{low:{form}} to {high:{form}}[/dim]"


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
    parser.add_argument("--tasks", metavar="A,B", help="names or YAML files of lm-eval tasks to score instead")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="few-shot examples in the prompts of --tasks")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="maximum number of documents per task")
    parser.add_argument("--apply-chat-template", action="store_true", help="use the chat template for --tasks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="documents per batch (as in training)")
    parser.add_argument("--samples", type=positive_int, default=2000, metavar="B", help="bootstrap resamples (2000)")
    parser.add_argument(
        "--scale", type=parse_scale, default=1.0, metavar="X", help="factor of the adapter's update, or auto (1)"
    )
    return parser.parse_args(argv)


def _check_task_options(arguments: argparse.Namespace) -> None:
    if arguments.tasks is not None and not arguments.tasks.replace(",", "").strip():
        raise UserError(f"--tasks={shown(arguments.tasks)}: names no task; pass one, such as --tasks gsm8k")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot={arguments.num_fewshot}: must be 0 or more")
    for name in ("num_fewshot", "limit", "apply_chat_template"):
        value = getattr(arguments, name)
        if arguments.tasks is None and value is not None and value is not False:
            raise UserError(f"--{name.replace('_', '-')}: needs --tasks; add it, or remove this")


def _score_tasks(arguments: argparse.Namespace, run: FinishedRun, tokenizer: Any, batch_size: int) -> dict[str, Any]:
    """Print the scores of --tasks for base and adapter, and return them for JSON."""
    if arguments.data is not None or arguments.scale != 1.0:
        raise UserError(f"--tasks={arguments.tasks}: cannot be combined with --data or --scale; remove them")
    asked = {name: value for name, value in vars(arguments).items() if name in EvaluationSection.model_fields}
    try:
        scorer = TaskScores(EvaluationSection(**asked), tokenizer, batch_size, Ranks(0, 1, 0))
    except UserError as error:
        raise UserError(str(error).replace("evaluation.tasks=", "--tasks=")) from None
    device = default_device()
    model = load_trained(run, tokenizer, device)
    adapter = scorer.measure(model, device, errors=True)
    with model.disable_adapter():
        base = scorer.measure(model, device, errors=True)
    both = {"base": base, "adapter": adapter}
    table = Table("", "base", "base + adapter", box=None, pad_edge=False)
    for name in adapter.values:
        errors = [f" ± {scores.errors[name]:.4f}" if name in scores.errors else "" for scores in both.values()]
        table.add_row(name, f"{base.values[name]:.4f}{errors[0]}", f"{adapter.values[name]:.4f}{errors[1]}")
    Console(markup=False).print(table)
    return {name: {"scores": scores.values, "errors": scores.errors} for name, scores in both.items()}


def _run(arguments: argparse.Namespace) -> None:
    _check_task_options(arguments)
    if arguments.json is not None:
        check_result_file(arguments.json, f"--json={arguments.json}", {"run", "base", "adapter"})
    run = find_run(arguments.run, arguments.base_model, allow_mismatch=arguments.allow_mismatch)
    refuse_images(run, "its held-out loss is in metrics.jsonl")
    config = run.config
    if arguments.scale != 1.0:
        refuse_reward_model(run, "--scale is for models that write text; evaluate without it")
    tokenizer = saved_tokenizer(run)
    batch_size = arguments.batch_size or config.training.eval_batch_size or config.training.batch_size
    if arguments.tasks is not None:
        refuse_reward_model(run, "--tasks are for models that write text; evaluate without it")
        scores = _score_tasks(arguments, run, tokenizer, batch_size)
        if arguments.json is not None:
            record = {"run": str(arguments.run), "base_model": config.base_model, **scores}
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    samples, has_pairs = held_out_samples(run, tokenizer, arguments.data, arguments.split)
    if has_pairs and arguments.scale != 1.0:
        raise UserError(f"--scale={arguments.scale}: the held-out data are pairs of answers, not texts; leave it out")
    device = default_device()
    model = load_trained(run, tokenizer, device)
    given: dict[str, Any] = {"batch_size": batch_size, "resamples": arguments.samples}
    if has_pairs:
        model.config.pad_token_id = tokenizer.pad_token_id  # which a reward model's forward needs
        found = evaluate_pairs(model, samples, config, tokenizer.pad_token_id, **given)
        size = f"{found['pairs']:,} pairs"
    else:
        documents = [document for sample in samples for document in split_documents(sample)]
        given |= {"seed": config.seed, "scale": arguments.scale}
        found = evaluate(model, documents, tokenizer.pad_token_id, **given).to_dict()
        size = f"{found['documents']:,} documents, {found['target_tokens']:,} target tokens"
    precision = resolve_precision(config.training.precision, device)
    if config.adapter == "qlora":
        precision = f"{config.quantization.quant_type} ({precision})"
    elif config.training.qat:
        precision = f"{precision}, merged weights in {config.training.qat}"
    show(found, f"{config.base_model}, {precision} on {device.type}; {size}", Console())
    if arguments.scale == AUTO:
        print(f"best scale {found['scale']:g}; each half of the documents measured at the best scale of the other")
        print(f"zerolora merge {arguments.run} --scale {found['scale']:g}")
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
            **found,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after one line on stderr."""
    arguments = _parse(argv)
    quiet_libraries()
    return run_command(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
