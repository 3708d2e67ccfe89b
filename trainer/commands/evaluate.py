"""`zerolora eval RUN`: held-out loss of the base model with and without the adapter, with confidence intervals.

Loss = sum of token losses / number of target tokens, in nats, over all documents. Intervals are percentile
bootstrap intervals (Efron, 1979) over documents, because the tokens of a document are not independent: documents are
resampled with replacement. Base and adapter use the same resamples, so the comparison is paired.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from trainer.checkpoint.finished_run import (
    BASE_MODEL_HELP,
    FinishedRun,
    add_run_arguments,
    choose_default_device,
    find_run,
    load_saved_tokenizer,
    load_trained_model,
    silence_libraries,
)
from trainer.checkpoint.identity import check_held_out, is_training_data
from trainer.config import CommandParser, RunConfig, SourceSection, UserError, reports_errors
from trainer.config.command_line import parse_positive_int
from trainer.config.errors import format_count, to_text
from trainer.config.evaluation_section import EvaluationSection
from trainer.contract.output_files import check_result_file
from trainer.data.batches import MicroBatch, PairBatch, collate_samples
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Sample, Samples, split_documents
from trainer.data.source_files import build_source
from trainer.data.vision import ImageInputs, ImageReader
from trainer.model.base import get_context_length, load_model_config
from trainer.model.image_reader import build_image_inputs, load_image_reader
from trainer.parallel.engine.deepspeed_engine import resolve_precision
from trainer.parallel.ranks.group import Ranks
from trainer.patches.loss_head import TokenLoss
from trainer.setup.kinds import check_task_supports
from trainer.setup.text_run import find_task, tokenize
from trainer.tasks.lm_eval_scores import TaskEvaluator

CONFIDENCE = 0.95
FEW_DOCUMENTS = 30
Interval = tuple[float, float, float]
"""A value and the bounds of its bootstrap interval."""
Losses = NDArray[np.float64]


DOCUMENT_COLUMNS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "loss": ("loss (nats/token)", ".4f", float),
    "bits_per_token": ("bits/token", ".4f", lambda nats: nats / math.log(2)),
    "perplexity": ("perplexity", ",.2f", lambda nats: torch.tensor(nats, dtype=torch.float64).exp().item()),
}
"""Table columns for texts: name of the value -> title, format and conversion from the loss in nats."""
PAIR_COLUMNS = {
    "loss": ("loss (nats/pair)", ".4f"), "accuracy": ("accuracy", ".1%"), "margin": ("reward margin", ".4f"),
}  # fmt: skip
ANSWER_COLUMNS = {
    "loss": ("loss of an answer", ".4f"), "accuracy": ("accuracy", ".1%"), "margin": ("distance from baseline", ".4f"),
}  # fmt: skip
COLUMNS: dict[str, Any] = {"documents": DOCUMENT_COLUMNS, "pairs": PAIR_COLUMNS, "answers": ANSWER_COLUMNS}
"""Columns by unit; labeled answers (`kto`) are compared with their batch's baseline."""


def evaluate(
    model: Any,
    documents: Sequence[Sample],
    pad_token_id: int,
    *,
    batch_size: int,
    resamples: int,
    seed: int,
    images: ImageReader | None = None,
) -> dict[str, Any]:
    """Return the losses of a PEFT model with and without its adapter on the same documents, as JSON values.

    `difference` is adapter minus base; perplexity_ratio is the adapter's perplexity divided by the base's.
    """
    inputs = None if images is None else build_image_inputs(images, model, add_dummy_images=False)
    base, adapter = _measure_documents(model, documents, pad_token_id, batch_size, inputs)
    # The first token of a document is not predicted.
    tokens = np.array([sum(weight > 0 for weight in each.loss_weights[1:]) for each in documents], dtype=np.float64)
    results: dict[str, Any] = {"documents": len(documents), "target_tokens": int(tokens.sum())}
    for part, values in bootstrap(base, adapter, tokens, resamples=resamples, seed=seed).items():
        results[part] = {}
        for name, (_, _, convert) in DOCUMENT_COLUMNS.items():
            name = "perplexity_ratio" if (part, name) == ("difference", "perplexity") else name
            results[part] |= _interval_to_json(name, [convert(value) for value in values])
    return results


def bootstrap(base: Losses, adapter: Losses, weights: Losses, *, resamples: int, seed: int) -> dict[str, Interval]:
    """Return sum(values) / sum(weights) for base, adapter and their difference, with 95 % bootstrap intervals."""
    generator = np.random.default_rng(seed)
    draws = np.empty((3, resamples))
    for index in range(resamples):
        drawn = generator.integers(len(weights), size=len(weights))
        count = weights[drawn].sum()
        before, after = base[drawn].sum() / count, adapter[drawn].sum() / count
        draws[:, index] = before, after, after - before
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=1)
    means = np.array([base.sum(), adapter.sum(), adapter.sum() - base.sum()]) / weights.sum()
    parts = ("base", "adapter", "difference")
    return {part: (float(means[row]), float(low[row]), float(high[row])) for row, part in enumerate(parts)}


def _interval_to_json(name: str, values: Sequence[float]) -> dict[str, Any]:
    value, low, high = values
    return {name: value, f"{name}_interval": [low, high]}


def evaluate_pairs(
    model: Any, samples: Samples, config: RunConfig, pad_token_id: int, *, batch_size: int, resamples: int
) -> dict[str, Any]:
    """Return loss, accuracy and margin of base and adapter, and the differences between them.

    Each value has a bootstrap interval over pairs (for KTO, over answers).
    """
    loss = find_task(config).build_pair_loss(model, config)
    values = _measure_pairs(model, loss, samples, pad_token_id, batch_size)
    pairs = values.shape[-1]
    results: dict[str, Any] = {loss.results_key: pairs, "base": {}, "adapter": {}, "difference": {}}
    for name, base, adapter in zip(PAIR_COLUMNS, *values, strict=True):
        intervals = bootstrap(base, adapter, np.ones(pairs), resamples=resamples, seed=config.seed)
        for part, interval in intervals.items():
            results[part] |= _interval_to_json(name, interval)
    return results


@torch.no_grad()
def _measure_pairs(model: Any, loss: Any, samples: Samples, pad_token_id: int, batch_size: int) -> NDArray[np.float64]:
    """Return the loss, accuracy and margin of every pair for base and adapter, as [2, 3, pairs]."""
    documents = [document for sample in samples for document in split_documents(sample)]
    margins = [margin for sample in samples for margin in sample.margins]
    parts: list[torch.Tensor] = []
    for start in range(0, len(documents) // 2, batch_size):
        rows = documents[2 * start : 2 * (start + batch_size)]
        batch = collate_samples(rows, pad_token_id, packed=False, flat=False, pairs=True)
        assert isinstance(batch, PairBatch)
        batch = replace(batch, margins=torch.tensor(margins[start : start + batch_size]))  # dropped by split_documents
        for context in (model.disable_adapter, nullcontext):
            with context():
                parts.append(loss.measure_pairs(model, batch, model.device).double())
    return torch.stack([torch.cat(parts[::2], 1), torch.cat(parts[1::2], 1)]).cpu().numpy()


def load_held_out_samples(
    run: FinishedRun, tokenizer: Any, data: str | None, split: str | None, images: ImageReader | None = None
) -> tuple[Samples, bool]:
    """Return the run's held-out samples, or all samples in `data` (read as in training), and whether they are pairs.

    Raises UserError if the run has no held-out samples and `data` is None, or if `data` is for another task.
    """
    section = run.config.dataset
    source = section.evaluation
    if data is not None:
        original = source or (section.mix[0] if section.mix else section)
        options = {name: getattr(original, name) for name in ("format", "fields", "template")}
        source = build_source(data, "--data", split=split or "train", **options)
    elif split is not None:
        raise UserError(f"--split={split}: needs --data; add --data FILE, or remove --split")
    elif source is None and not section.val_split:
        raise UserError(f"{run.folder}: the run has no held-out data; pass a data file with --data FILE")
    if source is not None:
        reset = {"mix": (), "evaluation": None, "val_split": 0.0, "packing": False, "streaming": False}
        fields = {name: getattr(source, name) for name in SourceSection.model_fields}
        section = section.model_copy(update=reset | fields)
    try:
        model_config = load_model_config(run.config.base_model, run.config.model)
        context = get_context_length(model_config)
        files = PreparedRun(tokenizer, model_config, None, context_length=context, images=images)
        prepared = tokenize(run.config.model_copy(update={"dataset": section}), files)
        has_pairs = bool((prepared.stats.evaluation or prepared.stats).pairs)
        find_task(run.config).check_can_evaluate(run.config, run.folder, prepared.stats)
    except UserError as error:
        if data is None:
            raise
        problem = str(error).replace("dataset.split=", "--split=").replace("dataset.path=", "--data=")
        names_source = problem.startswith(("--", f"{run.folder}: "))
        problem = problem if names_source else f"--data={to_text(data)}, read as in training: {problem}"
        raise UserError(problem) from None
    if source is None and not run.allow_mismatch:
        check_held_out(run.config, run.folder, prepared.origin)
    if data is not None and is_training_data(run.folder, prepared.origin):
        print(f"warning: --data={to_text(data)}: is the training data, so it cannot show overfitting", file=sys.stderr)
    samples = prepared.evaluation if source is None else prepared.train
    assert isinstance(samples, Samples)  # streams have no val_split
    return samples, has_pairs


def _measure_documents(
    model: Any, documents: Sequence[Sample], pad_token_id: int, batch_size: int, images: ImageInputs | None
) -> Losses:
    """Return the summed token losses of every document for base and adapter, as [2, documents]."""
    order = sorted(range(len(documents)), key=lambda index: -len(documents[index].input_ids))
    sums = np.empty((2, len(documents)))
    console = Console(stderr=True)
    # Without a terminal, a transient bar would leave an empty line.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for start in progress.track(range(0, len(order), batch_size), description="evaluating"):
            indices = order[start : start + batch_size]
            rows = [documents[index] for index in indices]
            batch = collate_samples(rows, pad_token_id, packed=False, flat=False, images=images)
            for row, context in enumerate((model.disable_adapter, nullcontext)):
                with context():
                    sums[row, indices] = compute_row_losses(model, batch).cpu().numpy()
    return sums


@torch.no_grad()
def compute_row_losses(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the summed token losses of each row of a micro-batch (nats, fp64, [B])."""
    return TokenLoss(model).compute_row_losses(model, batch, model.device)


def print_results(results: dict[str, Any], heading: str, console: Console) -> None:
    unit = next(unit for unit in COLUMNS if unit in results)
    columns = COLUMNS[unit]
    table = Table("", *(Column(title, justify="right") for title, *_ in columns.values()), box=None, pad_edge=False)
    for row, model in (("base", "base"), ("base + adapter", "adapter"), ("difference", "difference")):
        sign, values = "+" * (model == "difference"), results[model]
        table.add_row(row, *(_format_cell(values, name, sign + spec) for name, (_, spec, *_) in columns.items()))
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"[dim]below: {CONFIDENCE:.0%} bootstrap intervals over {unit}[/dim]", highlight=False)
    if results[unit] < FEW_DOCUMENTS:
        console.print(f"[yellow]only {results[unit]} {unit}: the intervals are rough[/yellow]")


def _format_cell(values: dict[str, Any], name: str, spec: str) -> str:
    mark = ""
    if name not in values:
        name, spec, mark = f"{name}_ratio", ".3f", "x "
    low, high = values[f"{name}_interval"]
    return f"{mark}{values[name]:{spec}}\n[dim]{low:{spec}} to {high:{spec}}[/dim]"


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora eval", description="Report loss, bits/token and perplexity of base and adapter on held-out data."
    )
    add_run_arguments(parser, BASE_MODEL_HELP)
    parser.add_argument(
        "--data", metavar="FILE", help="a file, folder or Hub ID to evaluate on instead of the run's held-out data"
    )
    parser.add_argument("--split", help="split of --data (default: train)")
    parser.add_argument("--tasks", metavar="A,B", help="names or YAML files of lm-eval tasks to run instead")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="few-shot examples in the prompts of --tasks")
    parser.add_argument("--limit", type=parse_positive_int, metavar="N", help="maximum number of documents per task")
    parser.add_argument("--apply-chat-template", action="store_true", help="use the chat template for --tasks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--batch-size", type=parse_positive_int, metavar="N", help="documents per batch (default: as in training)"
    )
    parser.add_argument(
        "--samples", type=parse_positive_int, default=2000, metavar="B", help="bootstrap resamples (default: 2000)"
    )
    return parser.parse_args(argv)


def _check_task_options(arguments: argparse.Namespace) -> None:
    if arguments.tasks is not None and not arguments.tasks.replace(",", "").strip():
        raise UserError(f"--tasks={to_text(arguments.tasks)}: empty; pass a task, such as --tasks gsm8k")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise UserError(f"--num-fewshot={arguments.num_fewshot}: must be 0 or more")
    for name in ("num_fewshot", "limit", "apply_chat_template"):
        value = getattr(arguments, name)
        if arguments.tasks is None and value is not None and value is not False:
            raise UserError(f"--{name.replace('_', '-')}: needs --tasks; add --tasks, or remove this option")


def _score_tasks(arguments: argparse.Namespace, run: FinishedRun, tokenizer: Any, batch_size: int) -> dict[str, Any]:
    if arguments.data is not None:
        raise UserError(f"--tasks={arguments.tasks}: cannot be combined with --data; remove one")
    settings = {name: value for name, value in vars(arguments).items() if name in EvaluationSection.model_fields}
    try:
        scorer = TaskEvaluator(EvaluationSection(**settings), tokenizer, batch_size, Ranks(0, 1, 0))
    except UserError as error:
        raise UserError(str(error).replace("evaluation.tasks=", "--tasks=")) from None
    device = choose_default_device()
    model = load_trained_model(run, tokenizer, device)
    adapter = scorer.measure(model, device, standard_errors=True)
    with model.disable_adapter():
        base = scorer.measure(model, device, standard_errors=True)
    results = {"base": base, "adapter": adapter}
    table = Table("", "base", "base + adapter", box=None, pad_edge=False)
    for name in adapter.values:
        errors = [f" ± {scores.errors[name]:.4f}" if name in scores.errors else "" for scores in results.values()]
        table.add_row(name, f"{base.values[name]:.4f}{errors[0]}", f"{adapter.values[name]:.4f}{errors[1]}")
    Console(markup=False).print(table)
    return {name: {"scores": scores.values, "errors": scores.errors} for name, scores in results.items()}


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    arguments = _parse_arguments(argv)
    silence_libraries()
    _check_task_options(arguments)
    if arguments.json is not None:
        check_result_file(arguments.json, f"--json={arguments.json}", {"run", "base", "adapter"})
    run = find_run(arguments.run, arguments.base_model, allow_mismatch=arguments.allow_mismatch)
    check_task_supports(run, "eval")
    config = run.config
    tokenizer = load_saved_tokenizer(run)
    batch_size = arguments.batch_size or config.training.eval_batch_size or config.training.batch_size
    record: dict[str, Any] = {"run": str(arguments.run), "base_model": config.base_model}
    if arguments.tasks is not None:
        check_task_supports(run, "eval --tasks")
        record |= _score_tasks(arguments, run, tokenizer, batch_size)
    else:
        record |= _measure_held_out(arguments, run, tokenizer, batch_size)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measure_held_out(
    arguments: argparse.Namespace, run: FinishedRun, tokenizer: Any, batch_size: int
) -> dict[str, Any]:
    config = run.config
    images = load_image_reader(config.base_model, config.model, config.dataset, tokenizer)
    samples, has_pairs = load_held_out_samples(run, tokenizer, arguments.data, arguments.split, images)
    device = choose_default_device()
    model = load_trained_model(run, tokenizer, device)
    options: dict[str, Any] = {"batch_size": batch_size, "resamples": arguments.samples}
    if has_pairs:
        results = evaluate_pairs(model, samples, config, tokenizer.pad_token_id, **options)
        unit = "pairs" if "pairs" in results else "answers"
        size = f"{results[unit]:,} {unit}"
    else:
        documents = [document for sample in samples for document in split_documents(sample)]
        results = evaluate(model, documents, tokenizer.pad_token_id, seed=config.seed, images=images, **options)
        counts = (results["documents"], "document"), (results["target_tokens"], "target token")
        size = ", ".join(format_count(*count) for count in counts)
    precision = resolve_precision(config.training.precision, device)
    if config.adapter == "qlora":
        precision = f"{config.quantization.quant_type} ({precision})"
    elif config.training.qat:
        precision = f"{precision}, merged weights in {config.training.qat}"
    print_results(results, f"{config.base_model}, {precision} on {device.type}; {size}", Console())
    return {
        "data": arguments.data or "held out by the run",
        "precision": precision,
        "device": device.type,
        "confidence": CONFIDENCE,
        "resamples": arguments.samples,
        "seed": config.seed,
        **results,
    }
