"""Compute the summed token losses of a micro-batch in chunks, with logits only at targets."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ops.head import (
    LOSS,
    MEASURES,
    NLL,
    LossKind,
    measure_logits,
    measure_tokens,
    sum_divergences,
    sum_token_losses,
    sum_token_losses_from_logits,
)
from trainer.contract.known_versions import patch_attribute, patch_objects, replaces, require
from trainer.data.batches import IGNORE_INDEX, MicroBatch
from trainer.data.image_features import TowerOutput
from trainer.model.expert_targets import LOAD_BALANCING
from trainer.parallel.engine.flat_adapter import find_flat_adapter
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.patches.packed_attention import VARLEN
from trainer.patches.per_document import build_document_inputs, has_separate_documents
from trainer.patches.plain_head import (
    describe_plain_head_problem,
    get_linear_layer,
    get_trained_rows,
    measure_head_factor,
    replace_head,
)

EXTRA_POSITION_ROW_MODELS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "paddleocr_vl")
"""Models that need a fourth row of positions, in addition to their own three, to separate the documents of a pack."""
TOKEN_TYPE_MODELS = ("molmo2",)
"""Models that require the type of each token in training: 0 for text."""


class TokenLoss:
    """Computes the summed loss of the targets: -log p or, if gradients are enabled, the weighted loss of `kind`.

    Head and loss are computed together in chunks if the head is one linear layer, frozen except for rows of new tokens,
    and a probe shows that the model at most scales the head's output. Otherwise the loss is computed from the logits.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        fused: bool | None = None,
        log: Callable[[str], None] | None = None,
        aux_loss_weight: float = 0.0,
        kind: LossKind = NLL,
    ) -> None:
        """Prepare the model's loss: `kind` if gradients are enabled, -log p otherwise.

        `fused` is the choice made in trainer/memory/decisions.py; if it turns out to be wrong, a warning is passed to
        `log`. `aux_loss_weight` is the weight of the model's own load-balancing loss, which training adds as
        `load_balancing_loss`.
        """
        self._module = module
        self._planned_fused, self._log = fused, log
        self._balance, self._kind = aux_loss_weight, kind
        self.load_balancing_loss: torch.Tensor | float = 0.0
        """Load-balancing loss of the latest batch, times `aux_loss_weight` and the batch's target weight."""
        base = find_base_model(module)
        self._base, self._config = base, base.config
        self._selects_positions = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._head: Any = base.get_output_embeddings() if self._selects_positions and fused is not False else None
        if describe_plain_head_problem(self._head):
            self._head = None
            self._warn_if_estimate_is_off(False)
        self._factor: float | None = None

    def __call__(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return the loss summed over the batch's targets, in nats, fp32."""
        return self.compute_by_part(model, batch, device, None)

    def compute_by_part(
        self, model: Any, batch: MicroBatch, device: torch.device, parts: Sequence[int] | None
    ) -> torch.Tensor:
        """Return the loss sum of each part of the batch [N]. `parts` lists the number of targets per part, in order.

        No matmul combines targets of different parts. With `parts=None`, returns the sum over the batch as a scalar.
        """
        self.probe_head(batch, device)
        inputs, targets = self._build_inputs(batch, device)
        weights = to_device(batch.weights, device) if torch.is_grad_enabled() else None

        # On the host, where the batch is, because nonzero() on the device would synchronize with it.
        flat = targets.flatten()
        target_positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
        chosen = to_device(flat[target_positions], device)
        positions_on_device = to_device(target_positions, device) if len(target_positions) != len(flat) else None
        call = partial(self._call_model, model, batch=batch)
        return self._compute_loss(call, inputs, chosen, positions_on_device, weights, parts)

    def build_host_inputs(self, batch: MicroBatch, min_positions: int = 1) -> tuple[dict[str, Any], torch.Tensor]:
        """Build inputs and targets [B, K] on the host for `compute_from_inputs`, with K >= `min_positions`."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.position_ids is not None:
            rows = (4, -1, -1) if self._config.model_type in EXTRA_POSITION_ROW_MODELS else batch.position_ids.shape
            inputs["position_ids"] = batch.position_ids.expand(rows)
        # Only our variable-length attention accepts document bounds; transformers infers them from position_ids.
        if batch.cu_seqlens is not None and self._config._attn_implementation == VARLEN:
            inputs |= {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen, **batch.shared_keys}
            if batch.sequence is not None:
                inputs["sequence"] = batch.sequence
        if self._config.model_type in TOKEN_TYPE_MODELS:
            inputs["mm_token_type_ids"] = torch.zeros_like(batch.input_ids)
        inputs |= batch.images
        targets = batch.targets
        if self._selects_positions:
            has_target = (targets != IGNORE_INDEX).any(0)
            positions = has_target.nonzero().squeeze(1)
            if len(positions) < min_positions:
                padding = (~has_target).nonzero().squeeze(1)[: min_positions - len(positions)]
                positions = torch.cat([positions, padding])
            targets = targets[:, positions]
            inputs["logits_to_keep"] = positions
        return inputs, targets

    def compute_from_inputs(self, model: Any, inputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss from device tensors without synchronizing with the device; requires `is_head_probed`.

        IGNORE_INDEX targets have a loss of 0.
        """
        return self._compute_loss(
            lambda inputs: model(**inputs, use_cache=False), inputs, targets.flatten(), None, None
        )

    def pop_metrics(self, *, training: bool = True) -> dict[str, float]:
        return {}

    @property
    def separates_documents(self) -> bool:
        return has_separate_documents(self._base)

    @property
    def is_head_probed(self) -> bool:
        return self._head is None or self._factor is not None

    def _compute_loss(
        self,
        call: Callable[..., Any],
        inputs: dict[str, Any],
        target_ids: torch.Tensor,
        target_positions: torch.Tensor | None,
        weights: torch.Tensor | None,
        parts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute the loss of the target tokens `target_ids` at `target_positions`.

        None for `target_positions` selects all positions; None for `weights` weights all targets by 1. Returns a
        sum for each of `parts`, or a single sum if `parts` is None.
        """

        def select(rows: torch.Tensor) -> torch.Tensor:
            flat = rows.flatten(0, 1)
            return flat if target_positions is None else flat.index_select(0, target_positions)

        def sum_parts(rows: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
            if parts is None:
                return loss(rows, target_ids, weights)
            sizes = list(parts)
            part_weights = [None] * len(sizes) if weights is None else weights.split(sizes)
            return torch.stack(list(map(loss, rows.split(sizes), target_ids.split(sizes), part_weights)))

        kind = self._kind if torch.is_grad_enabled() else NLL

        def compute_head_and_loss(hidden: torch.Tensor) -> torch.Tensor:
            weight, head = self._read_head()

            def loss(rows: torch.Tensor, ids: torch.Tensor, token_weights: torch.Tensor | None) -> torch.Tensor:
                return sum_token_losses(rows, weight, ids, **head, kind=kind, token_weights=token_weights)

            return sum_parts(select(hidden).to(weight.dtype), loss).view(1, -1, 1)

        if self._head is None:
            rows = select(call(inputs).logits)
            return sum_parts(rows, lambda part, ids, weights: sum_token_losses_from_logits(part, ids, kind, weights))
        with replace_head(self._head, compute_head_and_loss):
            scaled: torch.Tensor = call(inputs).logits
        return scaled.view(() if parts is None else -1) / (self._factor or 1.0)

    def _read_head(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the head's frozen weight, and the operator's arguments for the head's factor and trained rows."""
        arguments = {"factor": self._factor or 1.0, "rows": get_trained_rows(self._head)}
        return get_linear_layer(self._head).weight, arguments

    def measure_by_token(
        self, model: Any, batch: MicroBatch, device: torch.device, base_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the measures of `measure_tokens` [5, K] for the batch's K targets; LOSS is differentiable.

        `base_states` is the result of `compute_base_states`, and requires `computes_in_chunks`.
        """
        self.probe_head(batch, device)
        inputs, targets = self._build_inputs(batch, device)
        flat = targets.flatten()
        positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
        target_positions, chosen = to_device(positions, device), to_device(flat[positions], device)

        def compute_measures(hidden: torch.Tensor) -> torch.Tensor:
            weight, head = self._read_head()
            states = hidden.flatten(0, 1).index_select(0, target_positions).to(weight.dtype)
            base = None if base_states is None else base_states.to(weight.dtype)
            return measure_tokens(states, weight, chosen, **head, base_hidden=base).view(1, -1, 1)

        with replace_head(self._head, compute_measures):
            values: torch.Tensor = self._call_model(model, inputs, batch).logits
        if self._head is not None:
            return values.view(len(MEASURES), -1) / (self._factor or 1.0)
        logits = values.flatten(0, 1).index_select(0, target_positions)
        losses = F.cross_entropy(logits.float(), chosen, reduction="none")
        return torch.cat([losses[None], measure_logits(logits, chosen)[LOSS + 1 :]])

    def _call_model(self, model: Any, inputs: dict[str, Any], batch: MicroBatch) -> Any:
        if not (self._balance and torch.is_grad_enabled()):
            return model(**inputs, use_cache=False)
        # The router also chooses experts for padding, and only a mask excludes these choices from the balance. The
        # model itself must not receive this mask, which would join the documents of a pack.
        mask = batch.attention_mask if batch.unpadded is None else batch.unpadded
        if mask is not None:
            mask = to_device(mask, inputs["input_ids"].device)
        with mask_balancing_loss(mask, self._base):
            result = model(**inputs, use_cache=False, output_router_logits=True)
        self.load_balancing_loss = self._balance * result.aux_loss * batch.target_weight
        return result

    def compute_divergence(
        self, model: Any, batch: MicroBatch, device: torch.device, *, base_states: torch.Tensor, with_gradient: bool
    ) -> torch.Tensor:
        """Return the sum of KL(adapted_t || base_t) over the positions t of the targets, in nats, fp32.

        `base_states` is the result of `compute_base_states` for this batch.
        """
        with self._allow_extra_passes(batch, device):
            inputs, target_positions = self._build_inputs_and_positions(batch, device)
            head = self._head

            def compare(hidden: torch.Tensor) -> torch.Tensor:
                weight, arguments = self._read_head()
                states = hidden.flatten(0, 1).index_select(0, target_positions).to(weight.dtype)
                return sum_divergences(states, base_states.to(weight.dtype), weight, **arguments).view(1, 1, 1)

            with torch.set_grad_enabled(with_gradient), replace_head(head, compare):
                logits: torch.Tensor = model(**inputs, use_cache=False).logits
            if head is not None:
                # As in the loss, undo the factor that the model applies to its logits.
                return logits.view(()) / (self._factor or 1.0)
            log_p_KV = logits.flatten(0, 1)[target_positions].float().log_softmax(-1)
            return (log_p_KV.exp() * (log_p_KV - base_states)).sum()

    def computes_in_chunks(self, batch: MicroBatch, device: torch.device) -> bool:
        """Return whether logits are computed from hidden states in chunks; a collective call."""
        with self._allow_extra_passes(batch, device):
            return self._head is not None

    def compute_base_states(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return the base model's states [K, H] at the K targets with `computes_in_chunks`, else log-probs [K, V]."""
        with self._allow_extra_passes(batch, device):
            inputs, target_positions = self._build_inputs_and_positions(batch, device)
            states: list[torch.Tensor] = []

            def record(hidden: torch.Tensor) -> torch.Tensor:
                states.append(hidden.flatten(0, 1).index_select(0, target_positions))
                return hidden.new_zeros(1, 1, 1)

            with torch.no_grad(), bypass_adapter(self._module), replace_head(self._head, record):
                logits: torch.Tensor = model(**inputs, use_cache=False).logits
            return states[0] if states else logits.flatten(0, 1)[target_positions].float().log_softmax(-1)

    @contextmanager
    def _allow_extra_passes(self, batch: MicroBatch, device: torch.device) -> Iterator[None]:
        """Allow other forward passes in the block, then restore the flat adapter's views for the backward pass."""
        self.probe_head(batch, device)
        flat = find_flat_adapter(self._module)
        with flat.keep_views() if flat is not None else nullcontext():
            yield

    def _build_inputs_and_positions(
        self, batch: MicroBatch, device: torch.device
    ) -> tuple[dict[str, Any], torch.Tensor]:
        inputs, targets = self._build_inputs(batch, device)
        return inputs, to_device((targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1), device)

    def probe_head(self, batch: MicroBatch, device: torch.device) -> None:
        """On the first call, run the model on two tokens to decide how to compute head and loss."""
        if self._head is not None and self._factor is None:
            self._factor = measure_head_factor(self._module, self._head, batch.input_ids[:1, :2].to(device))
            if self._factor is None:
                self._head = None
            self._warn_if_estimate_is_off(self._head is not None)

    def compute_row_losses(self, model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return the summed loss of each row of the batch [B], in nats, fp64."""
        logits, targets = self.compute_logits(model, batch, device)
        # One row at a time, as fp32 logits of the whole batch would double the peak memory.
        rows = [
            F.cross_entropy(row.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")
            for row, target in zip(logits, targets, strict=True)
        ]
        return torch.stack(rows).double()

    def compute_logits(self, model: Any, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [B, K, V] at K positions. Return them and their targets [B, K] on the device."""
        inputs, targets = self._build_inputs(batch, device)
        return model(**inputs, use_cache=False).logits, to_device(targets, device)

    def _build_inputs(self, batch: MicroBatch, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
        # Padding is on the right, where no token attends to it. A mask would only select a slower kernel.
        inputs, targets = self.build_host_inputs(batch)
        move = partial(to_device, device=device)
        on_device = {name: move(value) for name, value in inputs.items()}
        return on_device | build_document_inputs(self._base, batch.position_ids, move), targets

    def _warn_if_estimate_is_off(self, fused: bool) -> None:
        if self._planned_fused is None or self._planned_fused == fused or self._log is None:
            return
        problem = "is fused with the output head; the memory estimate includes logits that are not materialized"
        if self._planned_fused:
            problem = "is not fused with the output head; the memory estimate omits the materialized logits"
        self._log(f"[yellow]warning:[/yellow] the loss {problem}")


@replaces("`_disable_adapters` of adapted layers")
def bypass_adapter(module: nn.Module) -> AbstractContextManager[None]:
    """Disable the adapter within the block; unlike PEFT, keep the requires_grad of its factors.

    Changing requires_grad would break a graph, an engine or a flat buffer that contains the factors.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    adapted = [part for part in module.modules() if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    layers = [layer for layer in adapted if not require(layer, "_disable_adapters", "peft")]
    return patch_objects(*((layer, "_disable_adapters", True) for layer in layers))


@replaces("`load_balancing_loss_func` of modeling files")
@contextmanager
def mask_balancing_loss(mask: torch.Tensor | None, base: nn.Module) -> Iterator[None]:
    """Restrict the load-balancing loss of `base` to the tokens where `mask` is 1, within the block."""
    modeling_file = sys.modules[type(base).__module__]
    balance = require(modeling_file, LOAD_BALANCING, "transformers")

    def balance_masked(*args: Any, **kwargs: Any) -> Any:
        return balance(**inspect.signature(balance).bind(*args, **kwargs).arguments | {"attention_mask": mask})

    with patch_attribute(modeling_file, LOAD_BALANCING, balance_masked, "transformers"):
        yield


def to_device(value: Any, device: torch.device) -> Any:
    """Copy tensors to the device asynchronously from pinned memory. Return other values unchanged."""
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    if isinstance(value, TowerOutput):
        return value.map_tensors(partial(to_device, device=device))
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
