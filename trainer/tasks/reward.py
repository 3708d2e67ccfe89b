"""Reward models: a score per answer, trained on pairs of a chosen and a rejected answer (Bradley and Terry, 1952)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from trainer.config import RunConfig
from trainer.config.task_sections import RewardSection
from trainer.data.batches import MicroBatch, PairBatch
from trainer.data.grouping import DataStats
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.patches.loss_head import TokenLoss, to_device
from trainer.patches.plain_head import replace_head
from trainer.tasks.language import LanguageTask
from trainer.tasks.preference import PAIR_METRICS, PairSums, check_answers

REWARD_METRICS = PAIR_METRICS[:4]


class RewardLoss(TokenLoss):
    """Computes the Bradley-Terry loss on the scores at the answers' last tokens, summed over pairs."""

    results_key = "pairs"

    def __init__(self, module: nn.Module, settings: RewardSection, **options: Any) -> None:
        super().__init__(module, **options)
        self._center = settings.center
        self._sums = PairSums()

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> Tensor:
        assert isinstance(batch, PairBatch)
        scores = self.score_answers(model, batch, device)
        chosen, rejected = scores.unbind(1)
        values = (chosen, rejected, chosen - rejected, chosen > rejected)
        self._sums.add_pairs(values)
        return self.compute_pair_losses(scores, batch.margins).sum()

    def measure_pairs(self, model: Any, batch: PairBatch, device: torch.device) -> Tensor:
        """Return the loss, accuracy and margin for every pair [3, P], fp32; a tie has accuracy 0.5."""
        scores = self.score_answers(model, batch, device)
        margins = scores[:, 0] - scores[:, 1]
        return torch.stack([self.compute_pair_losses(scores, batch.margins), (margins.sign() + 1) / 2, margins])

    def score_answers(self, model: Any, batch: PairBatch, device: torch.device) -> Tensor:
        """Return the scores of chosen and rejected answers, fp32 [P, 2]."""
        ends = find_last_tokens(batch, self._config.pad_token_id)[: len(batch.document_targets)]
        positions = to_device(ends, device)
        scores = self._score(model, batch, device, lambda hidden: hidden.flatten(0, 1).index_select(0, positions))
        return scores.view(-1, 2)

    def compute_pair_losses(self, scores: Tensor, margins: Tensor | None) -> Tensor:
        """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2 for each pair [P]."""
        chosen, rejected = scores.unbind(1)
        margin = 0.0 if margins is None else to_device(margins, scores.device)
        return -logsigmoid(chosen - rejected - margin) + self._center * (chosen + rejected).square()

    def compute_logits(self, model: Any, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the score at every position [B, L, 1] and the targets [B, L], on the device."""
        scores = self._score(model, batch, device, lambda hidden: hidden.flatten(0, 1))
        return scores.view(*batch.input_ids.shape, 1), to_device(batch.targets, device)

    def _score(self, model: Any, batch: MicroBatch, device: torch.device, select: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the scores of the hidden states that `select` returns, fp32.

        transformers pools the scores to one position per row, so the selected scores are broadcast to all positions.
        """
        inputs, _ = self._build_inputs(batch, device)
        head = self._base.score
        rows, length = batch.input_ids.shape

        def score(hidden: Tensor) -> Tensor:
            return type(head).forward(head, select(hidden)).view(1, 1, -1).expand(rows, length, -1)

        with replace_head(head, score):
            selected_scores: Tensor = model(**inputs, use_cache=False).logits
        return selected_scores[0].float()

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        """Return the averages of REWARD_METRICS over all pairs since the last call; a collective call."""
        return self._sums.pop_averages(REWARD_METRICS, training=training)


def find_last_tokens(batch: MicroBatch, pad_token_id: int) -> torch.Tensor:
    """Return the position of every document's last token in the flattened batch, int64 [D], skipping padding tokens.

    Like transformers, this also skips a padding token at the end of the text itself.
    """
    mask = batch.attention_mask if batch.unpadded is None else batch.unpadded
    inside = torch.ones_like(batch.input_ids) if mask is None else mask.long()
    continues = pad(inside[:, 1:], (0, 1))
    if batch.position_ids is not None:
        continues = continues * pad(batch.position_ids[:, 1:], (0, 1)).clamp(max=1)
    ends = (inside > continues).flatten().nonzero().squeeze(1)
    tokens = (inside * (batch.input_ids != pad_token_id)).flatten().nonzero().squeeze(1)
    return ends.scatter_reduce(0, torch.searchsorted(ends, tokens), tokens, "amax", include_self=False)


class RewardTask(LanguageTask):
    """Trains language models with a score head on pairs; a sample is one pair or a pack of pairs."""

    title = "a reward model"
    pairs = True
    peft_type = "SEQ_CLS"
    formats = ("peft",)
    auto_class, pipeline_tag = "AutoModelForSequenceClassification", "text-classification"
    predicts_time = False
    unsupported: ClassVar[Mapping[str, str]] = {
        "generate": "it scores answers, but does not generate them; see docs/guide/preference.md",
        "serve": "serve is only for models that generate text; `zerolora merge` writes the model for transformers",
        "eval --tasks": "--tasks is only for models that generate text; evaluate without it",
        "merge --scale": "--scale is only for models that generate text; merge without it",
        "merge --quantize": "--quantize is only for models that generate text; merge without it",
    }

    @classmethod
    def check_data(cls, config: RunConfig, stats: DataStats) -> list[str]:
        check_answers(config, stats)
        return []

    @staticmethod
    def build_pair_loss(model: Any, config: RunConfig) -> RewardLoss:
        return RewardLoss(model, config.reward)

    def load_base(self, dtype: torch.dtype, engine_config: dict[str, Any], shards: LayerShards | None) -> Any:
        model = super().load_base(dtype, engine_config, shards)
        model.config.pad_token_id = self._pad_token_id  # transformers needs it for batches of several rows
        return model

    def build_loss(self, model: Any, *, fused_head: bool | None) -> RewardLoss:
        return RewardLoss(model, self._config.reward)
