"""Build DeepSpeed's configuration and engine; no other file uses the configuration's keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from trainer.config import AUTO, TrainingSection, UserError, ZeroSection
from trainer.config.errors import describe_problem, to_text
from trainer.contract.known_versions import patch_attribute, replaces, require
from trainer.parallel.engine.kept_types import keep_frozen_dtypes
from trainer.parallel.engine.layer_gather.shards import get_layer_shards
from trainer.parallel.engine.partitioned import get_full_size, require_broadcast_exclusion, require_partitioned
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.stragglers import StragglerWatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolve `auto` to bf16 on GPUs of compute capability 8.0 or higher, fp16 on older ones, fp32 on a CPU.

    Raises UserError if the device does not support the precision.
    """
    if device.type != "cuda":
        if precision == "fp16":
            raise UserError("training.precision=fp16: needs a GPU, but none was found; use auto, bf16 or fp32")
        return "fp32" if precision == "auto" else precision
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "bf16" and not has_bf16:
        problem = f"{torch.cuda.get_device_name(device)} does not support it (requires compute capability 8.0)"
        raise UserError(f"training.precision=bf16: {problem}; use auto or fp16")
    if precision == "auto":
        return "bf16" if has_bf16 else "fp16"
    return precision


@replaces("defaults of DeepSpeed's configuration")
def build_deepspeed_config(
    training: TrainingSection,
    zero: ZeroSection,
    precision: str,
    on_gpu: bool,
    *,
    single_gradient: bool = False,
    has_adapter_guard: bool = False,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`; set `single_gradient` if the adapter is a flat tensor.

    With `has_adapter_guard`, `AdapterGuard` clips gradients and skips steps instead of DeepSpeed.
    """
    # A single gradient is complete at the very end of the backward pass, with nothing left to overlap. DeepSpeed 0.19.8
    # also synchronizes with the device before every overlapped reduction.
    overlaps = zero.overlap_comm and on_gpu and not single_gradient
    partition: dict[str, Any] = {
        "stage": zero.stage,
        "contiguous_gradients": True,
        "overlap_comm": overlaps,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
    }
    pin_memory = zero.pin_memory and on_gpu
    if zero.offload_optimizer:
        partition["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    if zero.stage == 3:
        partition |= {
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_param_persistence_threshold": zero.persistence_threshold,
            "stage3_max_live_parameters": zero.max_live_parameters,
        }
        if zero.offload_parameters:
            partition["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    on_device = can_guard_on_device(training, zero, precision, on_gpu)
    clips = has_adapter_guard or (zero.stage == 0 and precision == "fp32") or on_device
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        # Without this key DeepSpeed 0.19.8 clips at 1.0.
        "gradient_clipping": 0.0 if clips else training.max_grad_norm,
        "zero_optimization": partition,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        # Enabled by default; synchronizes with the device in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
    }
    if precision == "bf16":
        # Skip steps with a non-finite gradient, as with fp16, instead of destroying the weights.
        config["bf16"] = {"enabled": True, "check_grad_overflow": not clips}
    elif precision == "fp16":
        # Stage 0 does not support hysteresis, so reduce the loss scale at the first overflow, not at the second.
        dynamic = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
        config["fp16"] = {"enabled": True, **dynamic}
    return _merge_sections(config, zero.extra)


def can_guard_on_device(training: TrainingSection, zero: ZeroSection, precision: str, on_gpu: bool) -> bool:
    """Return whether gradients can be clipped and steps skipped on the GPU: AdamW, bf16, stage 1 or 2, no offload."""
    has_gpu_optimizer = zero.stage in (1, 2) and not zero.offload_optimizer
    return on_gpu and precision == "bf16" and has_gpu_optimizer and training.optimizer == "adamw"


def check_extra_keys(training: TrainingSection, zero: ZeroSection) -> None:
    """Raise UserError if DeepSpeed rejects a key or value in `zero.extra`."""
    if not zero.extra:
        return
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    stage = 2 if zero.stage == AUTO else zero.stage
    training, zero = training.model_copy(update={"batch_size": 1}), zero.model_copy(update={"stage": stage})
    try:
        DeepSpeedConfig(build_deepspeed_config(training, zero, "fp32", on_gpu=False))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"zero.extra: DeepSpeed rejects {key}={first['input']}: {describe_problem(first)}; change it"
        ) from None
    except Exception as error:  # any type, because DeepSpeed raises many types
        problem = f"DeepSpeed rejects it: {error}; change or remove it"
        raise UserError(f"zero.extra={to_text(zero.extra)}: {problem}") from None


@contextmanager
def enable_transformers_zero3(config: dict[str, Any]) -> Iterator[None]:
    """Within the block, make transformers and PEFT gather partitioned parameters before reading them (stage 3)."""
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    announcement = HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None
    try:
        yield
    finally:
        if announcement is not None:
            unset_hf_deepspeed_config()


@replaces("the compiler passes of DeepSpeed")
def start_engine(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Engine:
    import deepspeed

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # DeepSpeed allocates full buckets, so limit them to the size of all gradients.
    elements = sum(map(get_full_size, trainable))
    partition = config["zero_optimization"]
    partition["reduce_bucket_size"] = max(1, min(partition["reduce_bucket_size"], elements))
    if get_layer_shards(model) is not None:
        require_broadcast_exclusion()
    compute = next((DTYPES[name] for name in ("bf16", "fp16") if name in config), torch.float32)
    no_compiler = patch_attribute(deepspeed.runtime.engine, "is_deepcompile_supported", lambda: False, "deepspeed")
    with keep_frozen_dtypes(model, compute), no_compiler:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trainable, config=config)
    if partition["stage"] == 3:
        require_partitioned(trainable)
        from peft.tuners.lora import LoraLayer

        # Fused operators read these weights without calling the layers that own them.
        for module in model.modules():
            for parameter in module.parameters() if isinstance(module, LoraLayer) else ():
                deepspeed.zero.register_external_parameter(module, parameter)
    return engine


@replaces("the parameter fetch of stage 3, to time it")
def watch_stragglers(engine: Engine, ranks: Ranks, log: Callable[[str], None]) -> StragglerWatch | None:
    """Return a StragglerWatch that excludes waits for ZeRO-3 all-gathers, or None for a single rank (collective)."""
    if ranks.world_size == 1:
        return None
    watch = StragglerWatch(ranks, engine.device, log)
    shards = get_layer_shards(engine.module)
    if shards is not None:
        shards.time_waits(watch.exclude_wait)
    elif engine.zero_optimization_stage() == 3:
        offload = require(engine.optimizer, "parameter_offload", "deepspeed")
        coordinator = require(offload, "get_param_coordinator", "deepspeed")()
        fetch = require(coordinator, "fetch_sub_module", "deepspeed")

        # The compute stream waits only in this call. All-gathers and copies out of their buffers run on a separate
        # stream (`fetch_sub_module` in DeepSpeed 0.19.8).
        @wraps(fetch)
        def timed(*arguments: Any, **options: Any) -> Any:
            with watch.exclude_wait():
                return fetch(*arguments, **options)

        coordinator.fetch_sub_module = timed
    return watch


def _merge_sections(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge_sections(merged[key], value) if are_sections else value
    return merged
