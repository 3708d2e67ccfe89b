"""Build the optimizer (one of trainer/config/optimizers.yaml) and its learning rate schedule (from transformers)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch

from trainer.config import OPTIMIZERS, LoraSection, TrainingSection, UserError
from trainer.contract.known_versions import require
from trainer.data.step_count import compute_warmup_steps
from trainer.parallel.engine.flat_adapter import FLAT_PREFIX, UP
from trainer.parallel.engine.partitioned import get_full_shape
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import wait_for_device

AVERAGING_KEY = "train_mode"
"""Key in schedulefree's parameter groups; False while the model has the averaged weights."""
AVERAGING_STATE_KEYS = ("k", "weight_sum", "lr_max")
"""Keys in the parameter groups that schedulefree updates in every step."""


def build_optimizer(
    model: torch.nn.Module,
    training: TrainingSection,
    lora: LoraSection,
    *,
    fused: bool,
    adapters: Sequence[TrainingSection] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer; parameters with the same learning rate and weight decay form a group.

    LoRA+ (Hayou et al., 2024): the learning rate of B is `loraplus_lr_ratio` times the rate of A. Vectors (norms,
    biases, DoRA magnitudes) have no weight decay. If `adapters` is set, each adapter has its own groups and settings.
    Raises UserError if the optimizer trains only matrices and a parameter is not a matrix.
    """
    kind = OPTIMIZERS[training.optimizer]
    ratio = lora.loraplus_lr_ratio or 1.0
    groups: dict[tuple[float, float, int], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Under ZeRO-3 a partitioned parameter is flat, and DeepSpeed stores its shape. A flat adapter has matrices.
            dimensions = 2 if name.startswith(FLAT_PREFIX) else len(get_full_shape(parameter))
            if kind.needs_matrices and dimensions != 2:
                problem = f"trains only matrices, but {name} has {dimensions} dimensions"
                raise UserError(f"training.optimizer={training.optimizer}: {problem}; use adamw")
            is_up = "lora_B" in name or "lora_embedding_B" in name or name == f"{FLAT_PREFIX}{UP}"
            index = int(name.removeprefix(FLAT_PREFIX)) if adapters else 0
            settings = adapters[index] if adapters else training
            rate = settings.learning_rate * (ratio if is_up else 1.0)
            decay = settings.weight_decay if dimensions > 1 else 0.0
            groups.setdefault((rate, decay, index), []).append(parameter)
    param_groups = [
        {"params": params, "lr": rate, "weight_decay": decay} for (rate, decay, _), params in groups.items()
    ]
    adam = {"betas": (training.adam_beta1, training.adam_beta2), "eps": training.adam_epsilon}
    options = {name: adam[name] for name in kind.takes} | kind.options
    if training.optimizer == "adamw":
        options["fused"] = fused
    module, _, name = kind.path.rpartition(".")
    optimizer: Any = getattr(import_module(module), name)(param_groups, **options)
    if AVERAGING_KEY in optimizer.defaults:
        optimizer.train()
    return cast(torch.optim.Optimizer, optimizer)


def build_schedule(optimizer: torch.optim.Optimizer, training: TrainingSection, total_steps: int) -> Any:
    from transformers import get_scheduler

    kwargs: dict[str, Any] = {}
    warmup = compute_warmup_steps(training, total_steps)
    if training.lr_scheduler == "cosine_with_min_lr":
        kwargs["min_lr_rate"] = training.min_lr_ratio
    elif training.lr_scheduler == "cosine_with_restarts":
        kwargs["num_cycles"] = training.lr_cycles
    elif training.lr_scheduler == "warmup_stable_decay":
        decay = min(round(training.decay_ratio * total_steps), total_steps - warmup)
        kwargs |= {"num_decay_steps": decay, "min_lr_ratio": training.min_lr_ratio}
    return get_scheduler(
        training.lr_scheduler,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=kwargs or None,
    )


def restore_schedule(schedule: Any, steps: int) -> None:
    schedule.last_epoch = steps
    rates = [base * curve(steps) for base, curve in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def compute_rates(schedule: Any, total_steps: int) -> list[float]:
    return [float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step)) for step in range(total_steps)]


def has_positive_rate(schedule: Any) -> bool:
    """Return whether any step so far had a positive learning rate (the first step of a warm-up has rate 0)."""
    return sum(compute_rates(schedule, schedule.last_epoch)) > 0


@contextmanager
def use_averaged_weights(engine: Engine) -> Iterator[None]:
    """Use the optimizer's averaged weights in the model within the block, if it computes them.

    This is a collective call. The original weights are restored bit for bit.
    """
    optimizer: Any = engine.basic_optimizer
    groups = optimizer.param_groups
    if not groups[0].get(AVERAGING_KEY):
        yield
        return
    masters = [parameter for group in groups for parameter in group["params"]]
    originals = [master.detach().clone() for master in masters]
    wait_for_device()
    optimizer.eval()
    _refresh_model(engine)
    try:
        yield
    finally:
        wait_for_device()
        for master, original in zip(masters, originals, strict=True):
            master.data.copy_(original)
        for group in groups:
            group[AVERAGING_KEY] = True
        _refresh_model(engine)


def _refresh_model(engine: Engine) -> None:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage():
        require(optimizer, "update_lp_params", "deepspeed")()
    elif optimizer is not engine.basic_optimizer:  # 16-bit training; in fp32 the model's weights are the master weights
        with torch.no_grad():
            for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                torch._foreach_copy_(low, high)
