"""Start the Shannon Control Unit for a run, with reference texts for `kl`, and scale the adapter after training."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from trainer.config import RunConfig
from trainer.config.sections import MAX_AUTO_CACHE_BYTES
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Samples
from trainer.model.adapter import count_parameters
from trainer.model.saved_adapter import scale_adapter, scale_adapter_temporarily
from trainer.parallel.engine.optimizer import compute_rates
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import phase
from trainer.patches.loss_head import TokenLoss
from trainer.scu.controller import ScuController
from trainer.scu.divergence import Divergence, ReferenceDocuments, cache_base_states

MIN_TEXTS, MAX_GROUPS, NEIGHBORS = 64, 8, 8


def build_scu_controller(
    config: RunConfig, prepared: PreparedRun, ranks: Ranks, engine: Engine, loss: object, *, flat: bool,
    total_steps: int, step: int, restored: dict[str, Any] | None, run_dir: Path, log: Callable[[str], None],
) -> tuple[ScuController, list[str]]:  # fmt: skip
    """Return the controller, as of optimizer step `step` of `total_steps`, and warnings; a collective call.

    `flat`: whether packs are a single row of documents. `restored` is the controller's state in the checkpoint;
    `run_dir` contains the records of earlier steps. Raises UserError for invalid settings.
    """
    assert isinstance(loss, TokenLoss), "the SCU is only for language models"
    divergence = None
    if config.scu.measure == "kl":
        divergence = build_divergence(config, prepared, ranks, engine, loss, flat, total_steps, log)
    scu_controller = ScuController(
        config.scu,
        engine.module,
        target_tokens=prepared.data.stats.target_tokens,
        total_steps=total_steps,
        base_parameters=count_parameters(engine.module)[1],
        divergence=divergence,
    )
    if restored:
        return scu_controller, scu_controller.load_state_dict(restored, step=step, run_dir=run_dir)
    return scu_controller, [
        "scu.enabled=true: the checkpoint has no controller state; lambda starts over"
    ] if step else []


def list_target_warnings(
    scu_controller: ScuController, data_bpt: float, schedule: Any, config: RunConfig, total_steps: int, step: int
) -> list[str]:
    """Return `check_target`'s warnings for the planned learning rates; `data_bpt` is the loss before `step`."""
    ratio = config.lora.loraplus_lr_ratio or 1.0
    return scu_controller.check_target(
        data_bpt, compute_rates(schedule, total_steps)[step:], b_ratio=ratio, resumes=step > 0
    )


def build_divergence(
    config: RunConfig, prepared: PreparedRun, ranks: Ranks, engine: Engine, token_loss: TokenLoss, flat: bool,
    total_steps: int, log: Callable[[str], None],
) -> Divergence:  # fmt: skip
    """Build the measurement of K on the documents of scu.reference; a collective call."""
    training, scu = config.training, config.scu
    assert prepared.reference is not None, "scu.measure: kl without scu.reference was rejected"
    should_scale = scu.controller == "pi" and scu.scale_to_target
    held_out = choose_held_out(len(prepared.reference)) if should_scale else set()
    texts = [text for number, text in enumerate(prepared.reference) if number not in held_out]
    reference_length = sum(len(text.input_ids) for text in texts) / len(texts)
    length, stats = reference_length, prepared.data.stats
    if isinstance(prepared.data.train, Samples):
        length = stats.tokens / len(prepared.data.train)
    sequences = scu.reference_share * training.batch_size * training.gradient_accumulation_steps
    reference = ReferenceDocuments(
        documents=texts,
        rows=min(max(1, round(sequences * length / reference_length)), max(1, len(texts) // ranks.world_size)),
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        pad_token_id=prepared.tokenizer.pad_token_id,
        packed=config.dataset.packing,
        flat=flat,
    )
    log(f"scu: {reference.rows} of {len(texts):,} reference texts per rank and step, {escape(str(scu.reference))}")
    if should_scale and not held_out:
        log(f"scu.scale_to_target: not applied, because it needs at least {MIN_TEXTS} reference texts")
    states, visits = None, total_steps * reference.rows
    base = engine.module.get_base_model()
    width = base.config.get_text_config().hidden_size * base.dtype.itemsize
    size = width * sum(len(text.input_ids) - 1 for text in texts)
    is_worthwhile = size <= MAX_AUTO_CACHE_BYTES and visits >= 2 * len(texts)
    if is_worthwhile if scu.reference_cache == "auto" else scu.reference_cache:
        states = cache_base_states(engine, token_loss, reference)
        status = "not cached: this head needs full logits"
        if states:
            status = f"cached on the host, {size / 2**20:,.0f} MiB per rank: steps skip the base model's forward pass"
        log(f"scu: the base model's hidden states are {status}")
    divergence = Divergence(engine, token_loss, reference, base_states=states)
    if held_out:
        others = [prepared.reference[number] for number in sorted(held_out)]
        rows = math.gcd(reference.rows, len(others) // ranks.world_size or 1)  # at most the rows of a step
        divergence.held_out = Divergence(engine, token_loss, replace(reference, documents=others, rows=rows))
    return divergence


@phase("steer")
def scale_adapter_to_target(scu_controller: ScuController | None, model: Any, log: Callable[[str], None]) -> float:
    """Scale the adapter in memory to meet the `kl` target on held-out text; return the factor. A collective call."""
    if (
        scu_controller is None
        or scu_controller.divergence is None
        or (held_out := scu_controller.divergence.held_out) is None
    ):
        return 1.0

    def measure_kl_bits(factor: float) -> float:
        with scale_adapter_temporarily(model, factor):
            return held_out.measure_all()

    model.eval()
    fitted = find_scale(measure_kl_bits, scu_controller.law.target, len(held_out.reference.documents))
    scu_controller.fitted = asdict(fitted)
    scale_adapter(model, fitted.factor)
    log(fitted.format_summary(scu_controller.law.target))
    return fitted.factor


@dataclass(frozen=True)
class ScaleFit:
    factor: float
    kl_bits_before: float
    kl_bits: float
    texts: int

    def format_summary(self, target: float) -> str:
        result = f"scu.scale_to_target: on {self.texts} held-out reference texts K is {self.kl_bits_before:.4f} bits"
        if self.kl_bits_before <= target:
            return f"{result}, within the target of {target:g}"
        if self.factor == 1.0:
            return f"{result}, above the target of {target:g} at every scale: the update is not scaled"
        scaled = f"the update is scaled by {self.factor:.3f}, which reduces K to {self.kl_bits:.4f}"
        return f"{result}, above the target of {target:g}: {scaled}"


def choose_held_out(count: int) -> set[int]:
    """Return the indices of held-out texts: 1/8 of `count`, at most 64, and none for fewer than 64 texts."""
    # Choose groups of neighbors, so that parts of a document are rarely on both sides of the split.
    groups = min(count // MIN_TEXTS, MAX_GROUPS)
    begins = [(2 * group + 1) * count // (2 * groups) - NEIGHBORS // 2 for group in range(groups)]
    return {begin + number for begin in begins for number in range(NEIGHBORS)}


def find_scale(measure_kl_bits: Callable[[float], float], target: float, texts: int) -> ScaleFit:
    """Find the largest scale, in steps of 1/256, for which K is within the target; 1 if there is none."""
    low, high, measured = 0.0, 1.0, {1.0: measure_kl_bits(1.0)}
    while measured[1.0] > target and high - low > 1 / 256:
        middle = (low + high) / 2
        measured[middle] = measure_kl_bits(middle)
        low, high = (middle, high) if measured[middle] <= target else (low, middle)
    return ScaleFit(low or 1.0, measured[1.0], measured[low or 1.0], texts)
