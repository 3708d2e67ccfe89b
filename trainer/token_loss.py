"""The sum of token losses of a micro-batch, with logits only where there are targets, and never all of them at once."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ops.head import token_loss_sum
from trainer.attention import VARLEN
from trainer.partitioned import is_partitioned

MicroBatch = dict[str, Any]
IGNORED = -100


class TokenLoss:
    """-log p of the targets, summed.

    Where the head is one frozen linear layer and what the model makes of its output is a multiplication at most (which
    is observed, not looked up), head and loss are computed together in chunks; else from the logits.
    """

    def __init__(self, module: nn.Module) -> None:
        from peft import PeftModel

        self._module = module
        base: Any = module
        if isinstance(module, PeftModel):
            base = module.get_base_model()
        self._config = base.config
        self._picks_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._head: Any = base.get_output_embeddings() if self._picks_logits else None
        if not _is_plain_head(self._head):
            self._head = None
        self._factor: float | None = None

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """sum_t -log p(target_t) over the targets of the batch, nats, fp32."""
        if self._head is not None and self._factor is None:
            self._factor = self._observed_factor(batch, device)
            if self._factor is None:
                self._head = None
        if self._head is None:
            logits, targets = self.logits(model, batch, device)
            return F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        inputs, targets = self._inputs(batch, device)
        # The places of the targets are found on the host, where the batch is: on the device that would wait for it.
        flat = batch["targets"][:, inputs.pop("kept")].flatten()
        places = (flat != IGNORED).nonzero().squeeze(1)
        places_on_device, chosen = to_device(places, device), to_device(flat[places], device)

        def loss_of(hidden: torch.Tensor) -> torch.Tensor:
            weight = self._head.weight
            rows = hidden.flatten(0, 1)
            if len(places) != len(flat):
                rows = rows.index_select(0, places_on_device)
            return token_loss_sum(rows.to(weight.dtype), weight, chosen, factor=self._factor or 1.0).view(1, 1, 1)

        with _head_replaced(self._head, loss_of):
            scaled: torch.Tensor = model(**inputs, use_cache=False).logits
        return scaled.view(()) / (self._factor or 1.0)

    def by_row(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """The same for each row of the batch alone, nats, fp64 [B]."""
        logits, targets = self.logits(model, batch, device)
        # A row at a time: logits of the whole batch in 32 bits would double the peak.
        rows = [
            F.cross_entropy(row.float(), target, ignore_index=IGNORED, reduction="sum")
            for row, target in zip(logits, targets, strict=True)
        ]
        return torch.stack(rows).double()

    def logits(self, model: Any, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, K, V] and targets [B, K] on the device."""
        inputs, targets = self._inputs(batch, device)
        inputs.pop("kept", None)
        return model(**inputs, use_cache=False).logits, to_device(targets, device)

    def _inputs(self, batch: MicroBatch, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
        """What the model takes, on the device, and the targets [B, K], on the host.

        Positions without a target in any row are left out of the output head, which for small models and short answers
        is most of its work; `kept` are the others.
        """
        # Padding is on the right, where causal attention never looks back from: no mask, and no slower kernel for one.
        left_out = ["targets", "attention_mask", "tokens"]
        # Only our own variable-length attention takes document bounds; transformers' reads them off position_ids.
        if self._config._attn_implementation != VARLEN:
            left_out += ["cu_seqlens", "max_seqlen"]
        inputs = {key: to_device(value, device) for key, value in batch.items() if key not in left_out}
        targets = batch["targets"]
        if self._picks_logits:
            kept = (targets != IGNORED).any(0).nonzero().squeeze(1)
            kept = kept if kept.numel() else torch.zeros(1, dtype=torch.long)
            targets = targets[:, kept]
            inputs["kept"] = kept
            inputs["logits_to_keep"] = to_device(kept, device)
        return inputs, targets

    @torch.no_grad()
    def _observed_factor(self, batch: MicroBatch, device: torch.device) -> float | None:
        """c if the model's logits are c times what the head gives (1 for most, 1 / scaling for Granite), else None."""
        tokens = batch["input_ids"][:1, :2].to(device)
        seen: list[float] = []
        training = self._module.training
        self._module.eval()  # no dropout, whose draws would be missing in the first step
        for probe in (1.0, 2.0, -64.0):
            with _head_replaced(self._head, lambda hidden, value=probe: hidden.new_full((1, 1, 1), value)):
                logits = self._module(input_ids=tokens, use_cache=False).logits
            seen.append(float(logits) / probe if logits.shape == (1, 1, 1) else math.nan)
        self._module.train(training)
        return seen[0] if seen[0] > 0 and seen[0] == seen[1] == seen[2] else None


def _is_plain_head(head: Any) -> bool:
    """A frozen linear layer without bias, whole on this rank, in a format whose unscaled gradients do not vanish."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not head.weight.requires_grad
        and not is_partitioned(head.weight)
        and head.weight.dtype != torch.float16
    )


@contextmanager
def _head_replaced(head: nn.Module, forward: Any) -> Iterator[None]:
    """The head computes something else for one forward pass; hooks on it, which may fetch its weight, still run."""
    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor on the device; from page-locked memory, where alone a copy does not hold up the host."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
