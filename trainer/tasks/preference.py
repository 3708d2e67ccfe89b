"""Train language models on pairs of a chosen and a rejected answer (DPO and similar losses).

Both answers are documents in the same batch or pack, so one pass computes them. The reference is the same
model with its adapter disabled. It needs a second forward pass without gradients, either in each step or
once before training (`preference.reference`), but no extra memory.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ops.head import BASE_LOSS, COLLISION, DIVERGENCE, ENTROPY, LOSS
from trainer.config import RunConfig, UserError
from trainer.config.errors import format_count
from trainer.config.task_sections import WITHOUT_REFERENCE, PreferenceSection
from trainer.data.batches import MicroBatch, PairBatch
from trainer.data.formats import PREFERENCE, UNPAIRED
from trainer.data.grouping import DataStats
from trainer.data.pairs import DESIRABLE, SIDES
from trainer.data.samples import Sample, Samples
from trainer.data.shared_prompts import MIN_SAVINGS, measure_savings
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.parallel.ranks.sequence_group import sum_over_parts
from trainer.patches.loss_head import TokenLoss, bypass_adapter, to_device
from trainer.patches.packing_probe import share_prompt_keys
from trainer.tasks.language import LanguageTask
from trainer.tasks.preference_losses import PairScores, compute_pair_losses

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Metrics averaged over pairs, with TRL's names; rewards are beta (log p - log p_ref) in nats."""
TOKEN_METRICS = ("entropy", "kl_bits")
"""Metrics averaged over the tokens of answers: the model's entropy in nats, as in TRL, and, if each step computes the
reference from the head's input, its divergence from the reference in bits."""
PAIRS = "pairs of a chosen and a rejected answer"
LABELED = "answers labeled true or false (dataset.fields.label)"
ScoredPairs = tuple[PairScores, torch.Tensor]  # the log-probabilities of a batch's pairs, and their losses [P]
MAX_SEARCHED_DOCUMENTS = 1000
"""Number of documents searched for the report's examples of both labels."""


class PairSums:
    def __init__(self) -> None:
        self._sums: dict[bool, torch.Tensor] = {}

    def add(self, sums: torch.Tensor, *, training: bool) -> None:
        self._sums[training] = self._sums.get(training, 0.0) + sums

    def add_pairs(self, values: Sequence[torch.Tensor]) -> None:
        sums = [value.detach().double().sum() for value in (*values, torch.ones_like(values[0]))]
        self.add(torch.stack(sums), training=torch.is_grad_enabled())

    def pop(self, *, training: bool) -> list[float]:
        """Return and reset the sums over all ranks; empty if nothing was added. This is a collective call."""
        sums = self._sums.pop(training, None)
        return [] if sums is None else sum_over_ranks(sums).tolist()

    def pop_averages(self, names: Sequence[str], *, training: bool) -> dict[str, float]:
        """Return and reset the averages over all pairs, by name; a collective call."""
        if not (sums := self.pop(training=training)):
            return {}
        prefix = "train" if training else "eval"
        return {f"{prefix}/{name}": total / max(sums[-1], 1.0) for name, total in zip(names, sums[:-1], strict=False)}


class PreferenceLoss(TokenLoss):
    answers_per_row = 2
    """Number of documents per row that count as answers; mismatched answers do not."""
    results_key = "pairs"
    """Plural noun for the columns of `measure_pairs`, used as a key in eval results."""
    reference_has_adapter = False
    """Whether the cached reference includes the adapter that training starts from."""

    def __init__(self, module: nn.Module, settings: PreferenceSection, **options: Any) -> None:
        super().__init__(module, **options)
        self._settings = settings
        needs_reference = any(name not in WITHOUT_REFERENCE for name in settings.loss)
        self.has_reference = settings.reference == "step" or (settings.reference == "auto" and needs_reference)
        self._sums, self._tokens = PairSums(), PairSums()

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        assert isinstance(batch, PairBatch)
        _, losses = self._score_pairs(model, batch, device)
        # All ranks that share a pair have its scores, so each one returns a fraction of its loss.
        return losses.sum() / (1 if batch.sequence is None else batch.sequence.size)

    def measure_pairs(self, model: Any, batch: PairBatch, device: torch.device) -> torch.Tensor:
        """Return the loss, accuracy and reward margin for every pair [3, P], fp32; a tie has accuracy 0.5."""
        scores, losses = self._score_pairs(model, batch, device)
        margins = self._compute_reward_margins(scores, batch)
        return torch.stack([losses, (margins.sign() + 1) / 2, margins])

    def _compute_reward_margins(self, scores: PairScores, batch: PairBatch) -> torch.Tensor:
        chosen, rejected = scores.log_ratios
        return self._settings.beta * (chosen - rejected)

    def _score_pairs(self, model: Any, batch: PairBatch, device: torch.device) -> ScoredPairs:
        """Run the model on a batch of pairs, and return their scores and losses; also records metrics."""
        needs_reference = self.has_reference and batch.reference is None
        return self.score_measures(*self.measure_tokens(model, batch, device, with_reference=needs_reference), batch)

    def measure_tokens(
        self, model: Any, batch: MicroBatch, device: torch.device, *, with_reference: bool
    ) -> tuple[torch.Tensor, bool]:
        """Return the result of `measure_by_token`, and whether it includes DIVERGENCE.

        With `with_reference`, the result also includes BASE_LOSS, the loss of each token under the reference.
        """
        states, base = None, None
        if with_reference and self.computes_in_chunks(batch, device):
            states = self.compute_base_states(model, batch, device)
        elif with_reference:
            base = self._measure_reference(model, batch, device)
        measures = self.measure_by_token(model, batch, device, states)
        if base is not None:
            measures = torch.cat([measures[:BASE_LOSS], base[None], measures[BASE_LOSS + 1 :]])
        return measures, states is not None

    def score_measures(self, measures: torch.Tensor, has_divergence: bool, batch: PairBatch) -> ScoredPairs:
        """Return the scores and losses of pairs from the result of `measure_tokens`; also records metrics."""
        counts, device, reference = batch.document_targets, measures.device, measures.new_zeros(1)
        if batch.reference is not None:
            reference = to_device(batch.reference.view(-1, 2), device)
        elif self.has_reference:
            reference = self._sum_answers(measures[BASE_LOSS].detach(), batch)
        self._add_token_metrics(measures.detach(), batch, with_reference=has_divergence and self.has_reference)
        policy = self._sum_answers(measures[LOSS], batch)
        lengths = to_device(counts.view(-1, 2).float(), device)
        scores = PairScores(*policy.unbind(1), *reference.expand_as(policy).unbind(1), *lengths.unbind(1))
        losses = self._compute_losses(scores, batch)
        if self._settings.weighting == "wpo":  # Zhou et al. 2024, equation 2: per token ln p - ln sum p^2
            aligned = self._sum_answers(measures[LOSS] + measures[COLLISION], batch, excess_weight=1.0) / lengths
            losses = losses * aligned.sum(1).exp().detach()
        return scores, losses

    def _add_token_metrics(self, measures: torch.Tensor, batch: PairBatch, *, with_reference: bool) -> None:
        """Record the token metrics of the answers, excluding mismatched answers."""
        counts = batch.document_targets
        is_answer = (torch.arange(len(counts)) % 2 < self.answers_per_row).repeat_interleave(counts)
        counted = is_answer[_slice_local_targets(batch, measures[LOSS])].nonzero().squeeze(1)
        measures = measures.index_select(1, to_device(counted, measures.device))
        values = (measures[ENTROPY], measures[DIVERGENCE] / math.log(2))[: 1 + with_reference]
        self._tokens.add_pairs(values)

    def _compute_losses(self, scores: PairScores, batch: PairBatch) -> torch.Tensor:
        chosen, rejected = (self._settings.beta * ratio for ratio in scores.log_ratios)
        values = (chosen, rejected, chosen - rejected, chosen > rejected, scores.chosen, scores.rejected)
        self._sums.add_pairs(values)
        return compute_pair_losses(scores, self._settings)

    def score_reference(self, model: Any, batch: PairBatch, device: torch.device) -> torch.Tensor:
        """Return the log-probabilities of chosen and rejected answers under the reference, fp32 [P, 2]."""
        return self._sum_answers(self._measure_reference(model, batch, device), batch)

    def _measure_reference(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        without = nullcontext() if self.reference_has_adapter else bypass_adapter(self._module)
        with self._allow_extra_passes(batch, device), torch.no_grad(), without:
            return self.measure_by_token(model, batch, device)[LOSS]

    def _sum_answers(
        self, losses: torch.Tensor, batch: PairBatch, *, excess_weight: float | None = None
    ) -> torch.Tensor:
        """Return the log-probability of each answer [P, 2], given the losses of its tokens.

        Tokens past the length of the pair's shorter answer are multiplied by `excess_weight`, which defaults to the
        setting `length_weight`.
        """
        excess_weight = self._settings.length_weight if excess_weight is None else excess_weight
        counts, local = batch.document_targets, _slice_local_targets(batch, losses)
        weights = to_device(_weigh_tokens(counts, excess_weight)[local], losses.device)
        documents = to_device(torch.repeat_interleave(counts)[local], losses.device)
        sums = losses.new_zeros(len(counts)).index_add(0, documents, -losses * weights)
        return (sums if batch.sequence is None else sum_over_parts(sums, batch.sequence)).view(-1, 2)

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        """Return the metrics averaged over pairs or tokens since the last call; a collective call."""
        pairs = self._sums.pop_averages(PAIR_METRICS, training=training)
        return pairs | self._tokens.pop_averages(TOKEN_METRICS, training=training)


class KtoLoss(PreferenceLoss):
    """KTO (Ethayarajh et al. 2024), summed over labeled answers. Each row's second document has a mismatched answer.

    The baseline is the mean of log p - log p_ref over all ranks' mismatched answers in this micro-step, detached and
    clamped to at least 0.
    """

    results_key = "answers"
    answers_per_row = 1

    def _compute_reward_margins(self, scores: PairScores, batch: PairBatch) -> torch.Tensor:
        """Return beta (log p - log p_ref - baseline) for every answer [P], negated for undesirable answers."""
        return self._compute_margins(scores, batch)[0]

    def _compute_margins(self, scores: PairScores, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the margins of the answers [P], whether they are desirable [P], and the baseline."""
        ratios, mismatched = scores.log_ratios
        sums = torch.stack([mismatched.detach().double().sum(), torch.ones_like(mismatched).double().sum()])
        total, count = sum_over_ranks(sums)
        baseline = (total / count.clamp(min=1.0)).clamp(min=0.0).float()
        is_desirable = to_device(_read_labels(batch), ratios.device)
        sign = is_desirable.float() * 2.0 - 1.0
        return sign * self._settings.beta * (ratios - baseline), is_desirable, baseline

    def _compute_losses(self, scores: PairScores, batch: PairBatch) -> torch.Tensor:
        margins, is_desirable, baseline = self._compute_margins(scores, batch)
        self._add_answer_metrics(scores, is_desirable, baseline, training=torch.is_grad_enabled())
        weights = self._settings.desirable_weight, self._settings.undesirable_weight
        return torch.where(is_desirable, *weights) * (-margins).sigmoid()

    @torch.no_grad()
    def _add_answer_metrics(
        self, scores: PairScores, is_desirable: torch.Tensor, baseline: torch.Tensor, *, training: bool
    ) -> None:
        values = torch.stack(
            [self._settings.beta * scores.log_ratios[0], scores.chosen, torch.ones_like(scores.chosen)]
        )
        kinds = torch.stack([is_desirable, ~is_desirable]).double()
        sums = torch.cat([(values.double() @ kinds.T).flatten(), torch.stack([baseline.double(), kinds.new_ones(())])])
        self._sums.add(sums, training=training)

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        """Return the metrics averaged over the answers with each label since the last call.

        Also returns the mean baseline as `kl`, in nats, and the token metrics. This is a collective call.
        """
        metrics = self._tokens.pop_averages(TOKEN_METRICS, training=training)
        if not (sums := self._sums.pop(training=training)):
            return metrics
        *totals, baseline, calls = sums
        prefix, counts = "train" if training else "eval", totals[4:]
        metrics[f"{prefix}/kl"] = baseline / calls
        for kind, (side, count) in enumerate(zip(SIDES, counts, strict=True)):
            for name, total in (("rewards", totals[kind]), ("logps", totals[2 + kind])):
                metrics |= {f"{prefix}/{name}/{side}": total / count} if count else {}
        if all(counts):
            metrics[f"{prefix}/rewards/margins"] = totals[0] / counts[0] - totals[1] / counts[1]
        return metrics


def _slice_local_targets(batch: PairBatch, values: torch.Tensor) -> slice:
    return slice(batch.targets_before, batch.targets_before + len(values))


def _read_labels(batch: PairBatch) -> torch.Tensor:
    """Return whether the first answer of each row is desirable, bool [P].

    Labels are encoded as the answers' loss weights. Without weights, every answer is desirable.
    """
    counts = batch.document_targets
    firsts = (counts.cumsum(0) - counts)[::2]
    return torch.ones(len(firsts), dtype=torch.bool) if batch.weights is None else batch.weights[firsts] == DESIRABLE


def _weigh_tokens(counts: torch.Tensor, excess_weight: float) -> torch.Tensor:
    """Return the weight of every target: `excess_weight` past the length of the pair's shorter answer, otherwise 1."""
    weights = torch.ones(int(counts.sum()))
    shortest = counts.view(-1, 2).amin(1).repeat_interleave(2)
    for start, count, shared in zip(counts.cumsum(0) - counts, counts, shortest, strict=True):
        weights[start + shared : start + count] = excess_weight
    return weights


def check_answers(config: RunConfig, stats: DataStats, loss: str | None = None) -> None:
    """Raise UserError unless the data suits the task: `kto` needs answers with both labels, all others need pairs."""
    is_kto, fix = loss == "kto", "use kto" if loss else "use task: preference with preference.loss: kto"
    setting, others = f"preference.loss={loss}" if loss else f"task={config.task}", {*stats.formats.values()}
    for label, part in (("dataset", stats), ("dataset.evaluation", stats.evaluation or stats)):
        labeled = part.desirable + part.undesirable
        if labeled and not is_kto:
            where = stats.find_source(label, UNPAIRED)
            raise UserError(f"{setting}: {where} has labeled answers, not pairs; {fix}")
        if is_kto and labeled < part.pairs:
            where = stats.find_source(label, PREFERENCE)
            fix = f"to use both answers of each pair, set {where}.format: unpaired"
            raise UserError(f"{setting}: {where} has pairs, not labeled answers; {fix}")
        if part.pairs < part.documents:
            where = stats.find_source(label, *(others - {PREFERENCE, UNPAIRED}))
            expected, wanted = (LABELED, UNPAIRED) if is_kto else (PAIRS, PREFERENCE)
            fix = f"fix or remove them, set {where}.format: {wanted}, or use task: language"
            raise UserError(f"task={config.task}: {where} has records that are not {expected}; {fix}")
    if is_kto and stats.pairs and not (stats.desirable and stats.undesirable):
        _report_one_label(config, stats)


def _report_one_label(config: RunConfig, stats: DataStats) -> None:
    """Raise UserError for training data with one label, which `dataset.val_split` may have caused."""
    held_out, count = stats.evaluation, stats.desirable + stats.undesirable
    only, other = ("true", "false") if stats.desirable else ("false", "true")
    if config.dataset.val_split and held_out and (held_out.undesirable if stats.desirable else held_out.desirable):
        problem = f"holds out all answers labeled {other}; hold out fewer, or add answers with this label"
        raise UserError(f"dataset.val_split={config.dataset.val_split:g}: {problem}")
    raise UserError(f"preference.loss=kto: all {count:,} labels of dataset are {only}; add the other label")


class PreferenceTask(LanguageTask):
    """Trains language models on preference pairs; a sample is one pair or a pack of pairs."""

    pairs = True
    predicts_time = False

    @classmethod
    def check_data(cls, config: RunConfig, stats: DataStats) -> list[str]:
        loss = next(iter(config.preference.loss))
        check_answers(config, stats, loss)
        if stats.margins:
            pairs = format_count(stats.margins, "pair")
            return [f"warning: dataset: margins are ignored ({pairs}), because only task: reward uses them"]
        return []

    @classmethod
    def check_can_evaluate(cls, config: RunConfig, folder: Path, stats: DataStats) -> None:
        """Raise UserError if the pairs cannot be evaluated because the run did not keep the reference adapter."""
        if not (stats.evaluation or stats).pairs:
            return  # texts or conversations passed with --data
        cls.check_data(config, stats)
        if config.preference.reference == "cached" and config.lora.adapter_path is not None:
            problem = "the reference is the adapter that training began with, which the run does not keep"
            fix = f"see eval/rewards in {folder}/metrics.jsonl, or pass texts or conversations with --data"
            raise UserError(f"{folder}: lora.adapter_path={config.lora.adapter_path}: {problem}; {fix}")

    @staticmethod
    def build_pair_loss(model: Any, config: RunConfig) -> PreferenceLoss:
        """Return the loss for evaluating a finished run's pairs, with the reference computed in each step."""
        settings = config.preference
        if settings.reference == "cached":
            settings = settings.model_copy(update={"reference": "step"})
        return (KtoLoss if "kto" in settings.loss else PreferenceLoss)(model, settings)

    def build_loss(self, model: Any, *, fused_head: bool | None) -> PreferenceLoss:
        self._build_image_inputs(model)
        balance, settings = self._config.training.router_aux_loss, self._config.preference
        kind = KtoLoss if "kto" in settings.loss else PreferenceLoss
        loss = kind(model, settings, fused=fused_head, log=self._log, aux_loss_weight=balance)
        loss.reference_has_adapter = self._config.lora.adapter_path is not None
        return loss

    def choose_examples(self, documents: Iterator[Sample]) -> list[tuple[str, Sample]]:
        if "kto" not in self._config.preference.loss:
            return list(zip(SIDES, documents, strict=False))
        examples: dict[str, Sample] = {}
        for answer in islice(documents, 0, MAX_SEARCHED_DOCUMENTS, 2):  # every second document is a mismatched answer
            label = "good answer" if max(answer.loss_weights) == DESIRABLE else "bad answer"
            weights = [float(weight > 0) for weight in answer.loss_weights]
            examples.setdefault(label, replace(answer, loss_weights=weights))
        return list(examples.items())

    def check_trainable(self, engine: Engine, loss: TokenLoss, *, varlen: bool) -> None:
        """Check the model's attention, share prompts, and cache the reference, as configured."""
        super().check_trainable(engine, loss, varlen=varlen)
        assert isinstance(loss, PreferenceLoss)
        self.shares_prompts = self._share_prompts(engine, loss)
        self.flat_packs = self.flat_packs or self.shares_prompts
        for samples in (self._prepared.data.train, self._prepared.data.evaluation):
            if self._config.preference.reference == "cached" and samples is not None:
                samples.reference = self._compute_reference(engine, loss, samples)

    def _share_prompts(self, engine: Engine, loss: PreferenceLoss) -> bool:
        """Share prompts within pairs if possible, and return whether they are shared; a collective call."""
        config, samples = self._config, self._prepared.data.train
        requested = config.preference.share_prompt
        saved = measure_savings(samples) if isinstance(samples, Samples) and requested else 0.0
        is_possible = not config.training.torch_compile and config.model.attn_implementation == "auto"
        is_possible = is_possible and config.parallel.sequence == 1 and self._images is None
        if self._images is not None and requested is True:
            raise UserError("preference.share_prompt=true: not supported for data with images; use auto")
        if not requested or (requested == "auto" and (saved < MIN_SAVINGS or not is_possible)):
            return False
        reason = share_prompt_keys(loss, engine.module, self._pad_token_id, self._device)
        if reason and requested is True:
            raise UserError(f"preference.share_prompt=true: not possible: {reason}; use auto")
        note = "shared by pairs" + (f", which saves {saved:.1%} of the tokens" if saved else "")
        self._log(f"prompts: {f'computed separately for each answer, because {reason}' if reason else note}")
        return not reason

    @torch.no_grad()
    def _compute_reference(self, engine: Engine, loss: PreferenceLoss, samples: Samples) -> NDArray[np.float64]:
        """Return the log-probabilities of all answers under the reference; a collective call."""
        size, data_rank = self._config.training.batch_size, self._data_parallel_options
        reference = torch.zeros(samples.count_answers_before(len(samples)), dtype=torch.float64, device=self._device)
        engine.eval()
        for number, batch in enumerate(self._iterate(samples, size)):
            assert isinstance(batch, PairBatch)
            first = samples.count_answers_before((number * data_rank["world_size"] + data_rank["rank"]) * size)
            answers = loss.score_reference(engine, batch, self._device).flatten()
            reference[first : first + len(answers)] = answers.double() / self._config.parallel.sequence
        engine.train()
        self._log(f"reference: log-probabilities of {format_count(len(reference), 'answer')} computed before training")
        return sum_over_ranks(reference).cpu().numpy()
