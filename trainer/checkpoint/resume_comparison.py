"""Resuming compares: what decides a run is in its checkpoints, and a run that goes on must be the same run.

What changes the run is refused, all of it at once, unless `training.resume_changes` names it; what no checkpoint can
follow (another rank or other layers of the adapter) is refused always; what may change is said.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.base_fingerprint import fingerprint_of_base, same_base
from trainer.checkpoint.checkpoint_files import Choice, choose_checkpoint, read_state
from trainer.config import AUTO, RunConfig, UserError
from trainer.config.errors import UserErrors, shown
from trainer.data.prepared import Prepared, samples_of
from trainer.data.step_count import with_global_batch
from trainer.ranks.group import Ranks

# The optimizer's state is that of these tensors, and of no others.
FIXED = (
    "lora.r",
    "lora.target_modules",
    "lora.exclude_modules",
    "lora.modules_to_save",
    "lora.dora",
    "lora.init",
    "model.added_tokens",
)
# Setting -> the name by which training.resume_changes allows it.
DECISIVE = {
    "adapter": "adapter",
    "lora.alpha": "adapter",
    "lora.dropout": "adapter",
    "lora.rslora": "adapter",
    "training.qat": "adapter",
    "seed": "seed",
    "training.optimizer": "optimizer",
    "training.precision": "precision",
}
OF_SECTIONS = {"dataset": "data", "image": "data", "quantization": "adapter", "scu": "scu"}
# Told by something better (the bytes behind a path, the global batch), or of this start only.
NOT_COMPARED = (
    "base_model",
    "output_dir",
    "output.overwrite",
    "model.revision",
    "model.tokenizer",
    "lora.adapter_path",
    "dataset.path",
    "dataset.on_bad_record",
    "dataset.workers",
    "dataset.cache_dir",
    "image.sample_steps",
    "image.sample_guidance",
    "image.sample_every",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "training.resume_from_checkpoint",
    "training.resume_changes",
)
# adapter_config.json's names for ours, of an adapter that is gone on with.
OF_PEFT = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "modules_to_save": "modules_to_save",
    "use_rslora": "rslora",
    "use_dora": "dora",
}


@dataclass(frozen=True)
class Resumption:
    """Where a run begins: at its start (None), or at a checkpoint; and what the user shall know of it."""

    checkpoint: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def run_identity(
    config: RunConfig, prepared: Prepared, world_size: int | None, precision: str | None
) -> dict[str, Any]:
    """What decides a run, as its checkpoints keep it; figures that are not known before the ranks start are None."""
    # `global_batch_size` is still undivided before the ranks start, and divided in them.
    shared = config if world_size is None else with_global_batch(config, samples_of(prepared), world_size)
    training = shared.training
    open_batch = world_size is None or training.batch_size == AUTO
    batch = None if open_batch else training.batch_size * training.gradient_accumulation_steps * (world_size or 1)
    data = config.dataset
    return {
        "names": {
            "dataset.path": data.path or ", ".join(str(source.path) for source in data.mix),
            "model.tokenizer": config.model.tokenizer or config.base_model,
            "batch": f"training.batch_size={training.batch_size} x gradient_accumulation_steps="
            f"{training.gradient_accumulation_steps} x {world_size} ranks",
        },
        "settings": _settings(config) | {"training.precision": precision},
        "base_model": config.base_model,
        "base": fingerprint_of_base(config.base_model, config.model),
        "data": dict(prepared.data.origin),
        "global_batch": batch,
        "ranks": world_size,
    }


def plan_resumption(
    config: RunConfig,
    prepared: Prepared,
    *,
    world_size: int | None,
    precision: str | None = None,
    choice: Choice | None = None,
) -> Resumption:
    """The checkpoint that is gone on from, every byte of it as it was written and of the same run.

    `choice` is what an earlier call of `choose_checkpoint` has found by reading. Raises UserError with a line for each
    thing that is different and must not be.
    """
    training = config.training
    if choice is None:
        choice = choose_checkpoint(training.resume_from_checkpoint, Path(config.output_dir), read=True)
    warnings = () if choice.warning is None else (choice.warning,)
    checkpoint = choice.checkpoint
    if checkpoint is None:
        return Resumption(None, warnings)
    state = read_state(checkpoint)
    notes = []
    if "run" in state:
        now = run_identity(config, prepared, world_size, precision)
        refused, note = compare(state["run"], now, checkpoint, training.resume_changes)
        if refused:
            raise UserErrors(refused)
        notes += [note] if note else []
    else:
        notes.append(
            f"{checkpoint.name} is of an older version, which kept nothing to compare: that model, data and settings "
            "are the same is taken on trust"
        )
    if training.max_steps is not None and int(state["step"]) >= training.max_steps:
        notes.append(nothing_left(int(state["step"]), training.max_steps))
    return Resumption(checkpoint, warnings, tuple(notes))


def nothing_left(step: int, total_steps: int) -> str:
    """For a run whose steps are done already."""
    return (
        f"the checkpoint is of step {step}, and training.max_steps or epochs come to {total_steps}: "
        "there is nothing left to train; raise them to go on"
    )


def agree_on_resumption(
    config: RunConfig, prepared: Prepared, ranks: Ranks, device: torch.device, precision: str
) -> Resumption:
    """Rank 0's `plan_resumption` for all ranks, all of which must call it; it alone reads the checkpoint's bytes."""
    answer: list[Resumption | list[str] | None] = [None]
    if ranks.is_main:
        try:
            answer[0] = plan_resumption(config, prepared, world_size=ranks.world_size, precision=precision)
        except UserError as error:
            answer[0] = error.messages if isinstance(error, UserErrors) else [str(error)]
    if dist.is_initialized() and ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=device)
    found = answer[0]
    if isinstance(found, list):
        raise UserErrors(found)
    assert found is not None, "rank 0 sent no answer"
    return found


def compare(
    then: dict[str, Any], now: dict[str, Any], checkpoint: Path, allowed: tuple[str, ...]
) -> tuple[list[str], str | None]:
    """A line for each difference that is refused, and one for all that are not; None if there are none of those."""
    refused: list[str] = []
    changed: list[str] = []

    def decide(change: str, problem: str, group: str | None) -> None:
        if group is None or group in allowed:
            changed.append(change)
        else:
            refused.append(f"{problem}; set it back, or allow the change with training.resume_changes: [{group}]")

    old_settings, new_settings = then["settings"], now["settings"]
    for name in (name for name in new_settings if name in old_settings):
        old, new = old_settings[name], new_settings[name]
        unknown = new == "auto" or (old == "auto" and name == "dataset.format")
        if old == new or unknown or (new is None and name == "training.precision"):
            continue
        if name in FIXED or (name == "adapter" and "none" in (old, new)):
            weights = "base_model" if old_settings["adapter"] == "none" else "lora.adapter_path"
            refused.append(
                f"{name}={shown(new)}: {checkpoint.name} was trained with {shown(old)}, and its optimizer state fits "
                f"nothing else; set it back, or begin a new run with {weights}: {checkpoint}"
            )
        else:
            group = DECISIVE.get(name) or OF_SECTIONS.get(name.partition(".")[0])
            decide(
                f"{name} {shown(old)} -> {shown(new)}",
                f"{name}={shown(new)}: {checkpoint.name} was trained with {shown(old)}",
                group,
            )
    same = same_base(then["base"], now["base"])
    if not same:
        what = "has other weights than" if same is False else "cannot be compared with"
        before = then["base_model"] if then["base_model"] != now["base_model"] else "what was there when"
        problem = f"base_model={now['base_model']}: {what} {before}, on which {checkpoint.name} was trained"
        decide("the weights of base_model", problem.replace("when, on which", "when"), "base_model")
    for part, name, what in (("content", "dataset.path", "data"), ("tokenizer", "model.tokenizer", "tokenizer")):
        old, new = then["data"].get(part), now["data"].get(part)
        if None not in (old, new) and old != new:
            problem = f"{name}={now['names'][name]}: not the {what} that {checkpoint.name} was trained with"
            decide(f"the {what}", problem, "data")
    old, new = then["global_batch"], now["global_batch"]
    if new is not None and old != new:
        before = f"{old} (training.global_batch_size: {old})"
        problem = f"{now['names']['batch']} = {new} samples a step: {checkpoint.name} was trained with {before}"
        decide(f"samples a step {old} -> {new}", problem, "batch")
    if now["ranks"] not in (None, then["ranks"]):
        changed.append(f"ranks {then['ranks']} -> {now['ranks']}")
    return refused, f"changed since {checkpoint.name}: {', '.join(changed)}" if changed else None


def _settings(config: RunConfig) -> dict[str, Any]:
    """Every setting that can be compared, by its dotted name; what is switched off has none."""
    values = config.model_dump(mode="json")
    if config.lora.adapter_path is not None:
        # Its own settings stand in for those of the section.
        values["lora"] = {name: value for name, value in values["lora"].items() if name not in OF_PEFT.values()}
        values["lora"] |= _of_adapter_path(config.lora.adapter_path)
    values["lora"]["init"] = values["lora"]["init"] if config.lora.init.startswith(("pissa", "olora")) else "default"
    off = {
        "lora": config.adapter == "none",
        "quantization": config.adapter != "qlora",
        "scu": not config.scu.enabled,
    }
    flat: dict[str, Any] = {"scu.enabled": config.scu.enabled}
    for name, value in values.items():
        if not isinstance(value, dict):
            flat[name] = value
        elif not off.get(name):
            flat |= {f"{name}.{key}": _without_order(f"{name}.{key}", inner) for key, inner in value.items()}
    return {name: value for name, value in flat.items() if name not in NOT_COMPARED}


def _without_order(name: str, value: Any) -> Any:
    """Names of layers are a set; of sources of data the paths do not count, but what is behind them."""
    if name in FIXED and isinstance(value, list) and name != "model.added_tokens":
        return sorted(value)
    if name == "dataset.mix":
        return [{key: inner for key, inner in source.items() if key != "path"} for source in value]
    if name == "dataset.evaluation" and value:
        return {key: inner for key, inner in value.items() if key != "path"}
    return value


def _of_adapter_path(adapter_path: str) -> dict[str, Any]:
    """The settings of an adapter that training begins with; none of one that is not on this machine yet."""
    file: Any = Path(adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        file = None if Path(adapter_path).exists() else try_to_load_from_cache(adapter_path, "adapter_config.json")
    if not isinstance(file, str | Path):
        return {}
    saved = json.loads(Path(file).read_text(encoding="utf-8"))
    found = {ours: saved[theirs] for theirs, ours in OF_PEFT.items() if theirs in saved}
    lists = ("target_modules", "exclude_modules", "modules_to_save")
    return {name: (value or [] if name in lists else value) for name, value in found.items()}
