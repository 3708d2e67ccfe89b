"""Compute the number of optimizer steps in a run and the global batch size, for `validate`, `estimate` and training."""

import math
from collections.abc import Iterator

from trainer.config import AUTO, RunConfig, TrainingSection, UserError
from trainer.config.errors import format_count
from trainer.config.training_sections import FRACTION_SETTINGS

MIN_AUTO_STEPS = 100
"""Minimum number of steps with `global_batch_size: auto`, if the data has that many samples."""
LARGEST_GLOBAL_BATCH = 32
FEW_STEPS = 20
AUTO_BATCH_SIZE_NOTE = "batch_size is chosen when training starts"
DEFAULT_SAVE_STEPS = TrainingSection.model_fields["save_steps"].default


def compute_steps_per_epoch(samples: int, global_batch_size: int) -> int:
    return -(-samples // global_batch_size)


def count_steps(training: TrainingSection, samples: int | None, world_size: int) -> int | None:
    """Return the number of optimizer steps in the run; None for an endless stream or an unresolved batch size."""
    if training.max_steps is not None:
        return training.max_steps
    if not samples or (training.batch_size == AUTO and training.global_batch_size in (None, AUTO)):
        return None
    return math.ceil(training.epochs * compute_steps_per_epoch(samples, compute_global_batch(training, world_size)))


def compute_global_batch(training: TrainingSection, world_size: int) -> int:
    if training.batch_size == AUTO:
        return training.global_batch_size or 1
    return training.batch_size * training.gradient_accumulation_steps * world_size


def compute_warmup_steps(training: TrainingSection, total: int) -> int:
    """Return the number of warm-up steps; `warmup_ratio` never includes the last step."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return min(math.ceil(training.warmup_ratio * total), total - 1)


def resolve_global_batch(config: RunConfig, samples: int | None, world_size: int) -> RunConfig:
    """Return the configuration with `training.global_batch_size` split into micro-batches and accumulation steps.

    `auto` selects the largest power of two, up to LARGEST_GLOBAL_BATCH, that leaves at least MIN_AUTO_STEPS steps. It
    depends on the number of ranks only if that number is not a power of two, or exceeds the result. A `batch_size` that
    does not divide a rank's part is reduced. Raises UserError for a size that cannot be divided evenly among the ranks.
    """
    training, wanted = config.training, config.training.global_batch_size
    if wanted is None:
        return config
    if wanted == AUTO:
        limit = LARGEST_GLOBAL_BATCH if samples is None else training.epochs * samples / MIN_AUTO_STEPS
        limit = min(LARGEST_GLOBAL_BATCH, max(1.0, limit)) / world_size
        per_rank = 2 ** math.floor(math.log2(limit)) if limit > 1 else 1
    elif wanted % world_size:
        near = max(1, round(wanted / world_size)) * world_size
        raise UserError(
            f"training.global_batch_size={wanted}: cannot be divided evenly among {world_size} ranks; "
            f"use {near}, or auto"
        )
    else:
        per_rank = wanted // world_size
    changes = {"global_batch_size": per_rank * world_size}
    if training.batch_size != AUTO:
        batch_size = next(size for size in range(min(training.batch_size, per_rank), 0, -1) if per_rank % size == 0)
        changes |= {"batch_size": batch_size, "gradient_accumulation_steps": per_rank // batch_size}
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def resolve_eval_and_save_steps(config: RunConfig, samples: int | None, world_size: int) -> RunConfig:
    """Return the configuration with evals_per_epoch and saves_per_epoch converted to steps, given the global batch.

    With best_checkpoint, saves coincide with evaluations.
    """
    training = config.training
    if not (training.evals_per_epoch or training.saves_per_epoch) or not samples or training.batch_size == AUTO:
        return config
    epoch_steps = compute_steps_per_epoch(samples, compute_global_batch(training, world_size))
    changes: dict[str, int | None] = {}
    if training.evals_per_epoch:
        changes |= {"eval_steps": math.ceil(epoch_steps / training.evals_per_epoch), "evals_per_epoch": None}
    if training.saves_per_epoch:
        save_steps = math.ceil(epoch_steps / training.saves_per_epoch)
        eval_steps = changes.get("eval_steps") or training.eval_steps
        if training.best_checkpoint and eval_steps:
            save_steps = -(-save_steps // eval_steps) * eval_steps
        changes |= {"save_steps": save_steps, "saves_per_epoch": None}
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def describe_steps(training: TrainingSection, samples: int | None, world_size: int) -> str:
    """Describe the steps, as in `21 (7 per epoch), 1 sample per step: batch_size 1 x accumulation 1 x 1 rank`."""
    total = count_steps(training, samples, world_size)
    if total is None:
        return f"{training.epochs:g} epochs of {format_count(samples or 0, 'sample')}; {AUTO_BATCH_SIZE_NOTE}"
    if training.batch_size == AUTO:
        return f"{total:,}; {AUTO_BATCH_SIZE_NOTE}"
    size = compute_global_batch(training, world_size)
    an_epoch = f" ({compute_steps_per_epoch(samples, size):,} per epoch)" if samples and not training.max_steps else ""
    return (
        f"{total:,}{an_epoch}, {format_count(size, 'sample')} per step: batch_size {training.batch_size} x "
        f"accumulation {training.gradient_accumulation_steps} x {format_count(world_size, 'rank')}"
    )


def list_step_warnings(
    config: RunConfig, samples: int | None, world_size: int, original: RunConfig | None = None
) -> list[str]:
    """Return warnings about settings unsuited to the number of steps. Raises UserError if the schedule is too long.

    `original` has the user's `evals_per_epoch` and `saves_per_epoch`, which `config` has as steps.
    """
    training = config.training
    total = count_steps(training, samples, world_size)
    if total is None:
        return []
    warmup = 0 if training.lr_scheduler == "constant" else compute_warmup_steps(training, total)
    if warmup >= total:
        raise UserError(
            f"training.warmup_steps={warmup}: the learning rate would never reach its peak in a run of {total:,} "
            "steps; use fewer, or training.warmup_ratio, which is a fraction of all steps"
        )
    steps = total - warmup
    if training.lr_scheduler == "cosine_with_restarts" and 1 < training.lr_cycles and steps < 2 * training.lr_cycles:
        raise UserError(
            f"training.lr_cycles={training.lr_cycles}: a cycle needs 2 steps, but only {steps:,} follow the warm-up; "
            f"use {max(1, steps // 2)} or fewer"
        )
    if training.lr_scheduler == "warmup_stable_decay" and warmup + training.decay_ratio * total >= total + 1:
        raise UserError(
            f"training.decay_ratio={training.decay_ratio:g}: only {steps:,} of {total:,} steps follow the warm-up; "
            f"use {steps / total:.2g} or less, or a shorter warm-up"
        )
    warnings = []
    if total < FEW_STEPS and training.max_steps is None:
        size = compute_global_batch(training, world_size)
        first = ", the first one with a learning rate of 0" if warmup else ""
        fixes = ["training.global_batch_size=auto"] * (size > world_size) + ["more training.epochs"]
        fixes += ["dataset.packing=false"] * config.dataset.packing
        warnings.append(
            f"{format_count(total, 'optimizer step')} in total{first} ({format_count(samples or 0, 'sample')}, {size} "
            f"per step): too few to learn much; try {', or '.join(fixes)}"
        )
    return [*warnings, *_describe_unreached(config, total, (original or config).training)]


def _describe_unreached(config: RunConfig, total: int, given: TrainingSection) -> Iterator[str]:
    """Yield a warning for each interval longer than the run, and for early-stopping patience that cannot run out."""
    training, patience = config.training, config.training.early_stopping
    evaluates = bool(config.dataset.val_split or config.dataset.evaluation or config.evaluation.tasks)
    compares = training.best_checkpoint or patience is not None
    best = ", and best_checkpoint and early_stopping have no losses to compare" * compares
    saved_anyway = training.save_minutes or training.best_checkpoint or training.max_steps is None
    periods = [
        ("training.eval_steps", training.eval_steps * evaluates, f"it is only evaluated at the end{best}"),
        ("training.save_steps", training.save_steps * (not saved_anyway), "it is only saved at the end"),
        ("training.logging_steps", training.logging_steps, "only its last step is logged"),
    ]
    if config.task == "image" and config.logging.sample_prompts:
        periods.append(("image.sample_every", config.image.sample_every, "samples are only drawn at its start and end"))
    if config.scu.enabled:
        periods.append(("scu.every", config.scu.every, "lambda is never updated"))
    length, quarter = format_count(total, "step"), max(1, total // 4)
    for name, steps, effect in periods:
        per_epoch = FRACTION_SETTINGS.get(name.rpartition(".")[2], "")
        if steps > total and (frequency := getattr(given, per_epoch, None)):
            fix, every = f"use {frequency * steps / quarter:.2g}", f"every {steps} steps"
            yield f"training.{per_epoch}={frequency:g}: is {every}, but the run has {length}, so {effect}; {fix}"
        elif steps > total and (name, steps) != ("training.save_steps", DEFAULT_SAVE_STEPS):
            yield f"{name}={steps}: the run has {length}, so {effect}; use {quarter}"
    count = total // training.eval_steps if evaluates and training.eval_steps else 0
    if patience is not None and 0 < count <= patience:
        fix = f"use {max(1, count // 4)}, or evaluate more often"
        yield f"training.early_stopping={patience}: the run has only {format_count(count, 'evaluation')}; {fix}"
