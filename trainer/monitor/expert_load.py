"""Load balance of MoE experts."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.contract.known_versions import replaces
from trainer.model.expert_layers import DOWN, expert_modules, expert_shape, takes_all_tokens
from trainer.monitor.hooks import FinishedStep, Hook
from trainer.parallel.ranks.group import sum_over_ranks


@replaces("the call of experts, to read its arguments")
class ExpertLoad(Hook):
    """Counts, on the device, the training tokens that each expert receives between two calls of `values`."""

    def __init__(self, model: nn.Module) -> None:
        self._experts = [each for each in expert_modules(model).values() if not takes_all_tokens(each)]
        self._visits: dict[int, Tensor] = {}
        for layer, experts in enumerate(self._experts):
            experts.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)

    @classmethod
    def for_model(cls, model: nn.Module, *, compiled: bool) -> "ExpertLoad | None":
        """Return None without experts, or if compiled: a hook would break the graph at every layer."""
        return cls(model) if expert_modules(model) and not compiled else None

    def _count(self, layer: int, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Recomputed layers count twice, which does not change the fractions.
        if not (experts.training and torch.is_grad_enabled()):
            return
        index = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][1]
        visits = self._visits.get(layer)
        if visits is None:
            count = expert_shape(experts, DOWN)[0]
            visits = self._visits[layer] = torch.zeros(count, dtype=torch.long, device=index.device)
        flat = index.reshape(-1).long()
        visits.scatter_add_(0, flat, torch.ones_like(flat))

    def after_step(self, step: FinishedStep) -> dict[str, float]:
        """Return the metrics of the steps since the last logged one."""
        return self.values() if step.is_logged else {}

    def values(self) -> dict[str, float]:
        """Return token fractions of the busiest and idlest expert and the entropy (1: uniform), averaged over layers.

        Every rank must call it: the counts are summed over the ranks in one all-reduce.
        """
        if not self._visits:
            return {}
        visits = [self._visits[layer] for layer in sorted(self._visits)]
        every = sum_over_ranks(torch.cat(visits)).split([len(counts) for counts in visits])
        fractions = [counts.double() / counts.sum().clamp(min=1) for counts in every]
        entropies = [torch.special.entr(fraction).sum() / math.log(max(len(fraction), 2)) for fraction in fractions]
        table = torch.stack([torch.stack([s.max(), s.min(), e]) for s, e in zip(fractions, entropies, strict=True)])
        busiest, idlest, entropy = table.mean(0).tolist()
        for counts in visits:
            counts.zero_()
        return {"experts/busiest_share": busiest, "experts/idlest_share": idlest, "experts/entropy": entropy}
