"""The plain way to train the same adapter: PEFT, torch's AdamW, and a loop of a dozen lines. What ours is held to."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from trainer.config import RunConfig
from trainer.data.batches import IGNORE_INDEX, Batches, collate_samples
from trainer.data.prepared import PreparedRun
from trainer.data.samples import Sample, Samples, split_documents
from trainer.model.adapter import build_lora_config
from trainer.model.base import load_base_model, resize_to_vocabulary
from trainer.model.older_names import keep_target_names
from trainer.model.targets import build_exclusion_pattern, resolve_targets
from trainer.parallel.engine.optimizer import build_schedule
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare

MakeOptimizer = Callable[..., torch.optim.Optimizer]
TokenLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NLL: TokenLosses = partial(F.cross_entropy, reduction="none")


def plain_losses(
    config: RunConfig,
    *,
    ranks: int,
    attention: str | None = "sdpa",
    device: torch.device,
    excluded: str | None = None,
    token_losses: TokenLosses = NLL,
) -> list[float]:
    """Loss per target, by its weight, at each step of `config`, trained as PEFT's documentation does it.

    The global batches are those that `ranks` ranks of zerolora train on, document by document: packs are taken apart,
    so that each document is a row of its own behind a mask. The adapter stays in 32 bits, as PEFT makes it; in bf16 the
    base is in 16 bits and the products are autocast, as transformers' Trainer does it. `excluded` is PEFT's
    `exclude_modules`; `token_losses` takes all logits [K, V] and targets [K].
    """
    by = token_losses
    return plain_training(config, ranks=ranks, attention=attention, device=device, excluded=excluded, by=by)[0]


def plain_training(
    config: RunConfig,
    *,
    ranks: int = 1,
    attention: str | None = None,
    device: torch.device,
    excluded: str | None = None,
    by: TokenLosses = NLL,
    optimizer: MakeOptimizer = torch.optim.AdamW,
) -> tuple[list[float], Any]:
    """The same, and the trained model."""
    training = config.training
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    prepared = prepare(config)
    model = load_base_model(config.base_model, config.model, dtype=dtype, device=device, attention=attention)
    set_seed(config.seed)
    resize_to_vocabulary(model, prepared.tokenizer)
    set_seed(config.seed)
    new = prepared.tokenizer.convert_tokens_to_ids(list(config.model.added_tokens))
    model = with_adapter(model, config, excluded, new)
    if training.qat:
        _round_by_torchao(model, training.qat)
    model.train()
    pad_token_id, losses = prepared.tokenizer.pad_token_id, []
    for samples in train_steps(_groups(model, config), config, prepared, ranks=ranks, make=optimizer):
        documents = [document for sample in samples for document in split_documents(sample)]
        losses.append(_step(model, documents, training.batch_size, pad_token_id, device, by))
    return losses, model


def train_steps(
    groups: list[Any],
    config: RunConfig,
    prepared: PreparedRun,
    *,
    ranks: int = 1,
    make: MakeOptimizer = torch.optim.AdamW,
) -> Iterator[list[Sample]]:
    """Yield the samples of each step's global batch, and update the parameters by the gradients computed meanwhile."""
    training = config.training
    settings: dict[str, Any] = {"weight_decay": training.weight_decay}
    if make is torch.optim.AdamW:
        settings["eps"] = training.adam_epsilon
    optimizer = make(groups, lr=training.learning_rate, **settings)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert training.max_steps is not None and isinstance(prepared.data.train, Samples)
    schedule = build_schedule(optimizer, training, training.max_steps)
    batches = Batches(
        prepared.data.train, batch_size=training.batch_size, accumulation=training.gradient_accumulation_steps * ranks,
        rank=0, world_size=1, seed=config.seed, shuffle=config.dataset.shuffle,
        pad_token_id=prepared.tokenizer.pad_token_id, flat=False,
    )  # fmt: skip
    epoch = offset = 0
    for _ in range(training.max_steps):
        indices = batches.get_order(epoch)[offset : offset + batches.global_batch_size].tolist()
        yield [prepared.data.train[index] for index in indices]
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        offset += len(indices)
        if offset >= len(prepared.data.train):
            epoch, offset = epoch + 1, 0


def with_adapter(
    model: Any, config: RunConfig, excluded: str | None, new_tokens: list[int], in_full: tuple[str, ...] = ()
) -> Any:
    from peft import get_peft_model

    # In the precision of the base first and widened afterwards: the same first values as in training in 16 bits.
    excluded = excluded or build_exclusion_pattern(model, config.lora)
    settings = build_lora_config(config.lora, excluded=excluded, targets=resolve_targets(model, config.lora))
    settings.modules_to_save = list(in_full) or settings.modules_to_save
    if new_tokens:
        settings.trainable_token_indices = {"embed_tokens": new_tokens}
        if not model.config.tie_word_embeddings:
            settings.trainable_token_indices["lm_head"] = new_tokens
    with keep_target_names():
        adapted = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype).float()
    return adapted


def rounded_by_torchao(weight: torch.Tensor, kind: str, group: int | None) -> torch.Tensor:
    """torchao's fake quantization with the gradient that torchao gives it; scales that cut nothing off."""
    from torchao.quantization.quant_primitives import MappingType, _fake_quantize_affine, choose_qparams_affine

    block, high = (1, group or weight.shape[1]), {"int8": 127, "int4": 7}[kind]
    mapping, least = MappingType.SYMMETRIC_NO_CLIPPING_ERR, torch.finfo(torch.float32).eps
    scale, zero = choose_qparams_affine(
        weight, mapping, block, torch.int8, -high - 1, high, least, torch.float32, torch.int32
    )
    rounded: torch.Tensor = _fake_quantize_affine(weight, block, scale, zero, torch.int8, -high - 1, high)
    return rounded


def _round_by_torchao(model: Any, kind: str) -> None:
    """Every adapted layer computes with torchao's fake-quantized W + s B A; groups of 64, as a model this wide has."""
    from peft.tuners.lora import LoraLayer

    def forward_of(layer: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            merged = layer.base_layer.weight + layer.scaling["default"] * (up @ down)
            return F.linear(x, rounded_by_torchao(merged, kind, 64 if kind == "int4" else None), layer.base_layer.bias)

        return forward

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = forward_of(layer)


def _groups(model: Any, config: RunConfig) -> list[dict[str, Any]]:
    """Return the factors A and B; LoRA+ multiplies the learning rate of B."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sides["lora_B" in name].append(parameter)
    rate = config.training.learning_rate
    rates = (rate, rate * (config.lora.loraplus_lr_ratio or 1.0))
    return [{"params": side, "lr": lr} for side, lr in zip(sides, rates, strict=True)]


def _step(
    model: Any, documents: list[Sample], rows: int, pad_token_id: int, device: torch.device, token_losses: TokenLosses
) -> float:
    """Forward and backward over a global batch, some rows at a time; the weighted mean over its targets."""
    parts = [documents[begin : begin + rows] for begin in range(0, len(documents), rows)]
    weight = sum(sum(document.loss_weights[1:]) for document in documents)
    total = 0.0
    for part in parts:
        batch = collate_samples(part, pad_token_id, packed=False, flat=False)
        assert batch.attention_mask is not None
        ids, mask, wanted = (tensor.to(device) for tensor in (batch.input_ids, batch.attention_mask, batch.targets))
        with torch.autocast(device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            more = {"mm_token_type_ids": torch.zeros_like(ids)} if model.config.model_type == "molmo2" else {}
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
        weights = torch.zeros(ids.shape)
        for row, document in enumerate(part):
            weights[row, : len(document.loss_weights) - 1] = torch.tensor(
                document.loss_weights[1:], dtype=torch.float32
            )
        counted = (wanted != IGNORE_INDEX).flatten()
        losses = token_losses(logits.float().flatten(0, 1)[counted], wanted.flatten()[counted])
        loss = (losses * weights.flatten().to(device)[counted]).sum()
        (loss / weight).backward()
        total += loss.item()
    return total / weight
