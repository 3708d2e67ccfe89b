"""Record the identity of a run (base model, tokenizer, adapter, data), and compare it before the run is loaded.

Checkpoints record it in state.json (`run`), finished runs in run.json (`identity`). Resuming compares everything and
reports all differences together. `training.resume_changes` allows the changes that it names; changes that do not match
the optimizer state (the adapter's rank or layers) are always rejected. Commands compare the parts that determine the
model they load.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainer.checkpoint.adapter_files import RECORD, SETTINGS, find_changed_files
from trainer.checkpoint.base_fingerprint import find_changed_part, fingerprint_base, is_same_base
from trainer.checkpoint.checkpoint_files import CheckpointChoice, choose_checkpoint, read_state
from trainer.config import AUTO, LoraSection, RunConfig
from trainer.config.adapter_settings import read_adapter_settings
from trainer.config.errors import UserErrors, to_text
from trainer.config.files import read_value
from trainer.config.yaml_core import read_yaml
from trainer.data.prepared import PreparedRun, count_samples
from trainer.data.step_count import compute_global_batch, resolve_global_batch
from trainer.model.adapter import find_initial_adapter
from trainer.model.base import load_model_config
from trainer.model.saved_adapter import get_last_components

ALLOW_MISMATCH_OPTION = "--allow-mismatch"
TABLES: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml")).tree
FIXED, NOT_COMPARED, GROUPS, PEFT_NAMES = (TABLES[name] for name in ("fixed", "not_compared", "groups", "peft_names"))
MODEL_SETTINGS, SPLIT_SETTINGS = tuple(TABLES["model"]), tuple(TABLES["split"])
"""Settings that determine the base model of a finished adapter, and settings that determine the held-out documents."""


class Identity(BaseModel):
    """The identity of a run. Values that are unknown before the ranks start are None."""

    names: dict[str, str | None] = {}
    settings: dict[str, Any] = {}
    base_model: str = ""
    base: dict[str, str] = {}
    data: dict[str, str] = {}
    global_batch: int | None = None
    ranks: int | None = None


@dataclass(frozen=True)
class Difference:
    problem: str
    """Error message, such as `setting=value: NAME was trained with ...`."""
    change: str
    """Short form, such as `setting old -> new`."""
    group: str | None
    """Value of training.resume_changes that allows the difference; None: always, unless `fixed` is set."""
    fixed: bool = False
    """Whether the difference always prevents resuming."""


def build_identity(
    config: RunConfig, prepared: PreparedRun | None, world_size: int | None, precision: str | None
) -> Identity:
    """Return the identity of a run that is about to train; without `prepared`, the data is not included."""
    # Divide `global_batch_size` among the ranks if their number is known.
    shared, data_ranks = config, config.count_data_ranks(world_size or 1)
    if prepared is not None and world_size is not None:
        shared = resolve_global_batch(config, count_samples(prepared), data_ranks)
    training = shared.training
    open_batch = world_size is None or training.batch_size == AUTO
    return Identity(
        names={
            "dataset.path": _format_data_path(config),
            "model.tokenizer": config.model.tokenizer or config.base_model,
            "batch": f"training.batch_size={training.batch_size} x gradient_accumulation_steps="
            f"{training.gradient_accumulation_steps} x {data_ranks if world_size else None} ranks",
        },
        settings=_collect_comparable_settings(config) | {"training.precision": precision},
        base_model=config.base_model,
        base=fingerprint_base(config.base_model, config.model),
        data={} if prepared is None else dict(prepared.data.origin),
        global_batch=None if open_batch else compute_global_batch(training, data_ranks),
        ranks=world_size,
    )


def read_recorded_identity(folder: Path) -> Identity | None:
    """Return the identity recorded with a checkpoint or finished run; None for any other adapter."""
    state = folder / "state.json"
    file, key = (state, "run") if state.is_file() else (folder / RECORD, "identity")
    return read_value(file, key, Identity | None) if file.is_file() else None


def find_differences(recorded: Identity, current: Identity, name: str) -> list[Difference]:
    """List how `current` differs from `recorded`, the identity stored in `name`. Unknown values count as equal."""
    differences = []
    for setting in (setting for setting in current.settings if setting in recorded.settings):
        old, new = recorded.settings[setting], current.settings[setting]
        unknown = new == "auto" or (old == "auto" and setting == "dataset.format")
        if old == new or unknown or (new is None and setting == "training.precision"):
            continue
        fixed = setting in FIXED or (setting == "adapter" and "none" in (old, new))
        group = GROUPS.get(setting) or GROUPS.get(setting.partition(".")[0])
        problem = f"{setting}={to_text(new)}: {name} was trained with {to_text(old)}"
        differences.append(Difference(problem, f"{setting} {to_text(old)} -> {to_text(new)}", group, fixed))
    same = is_same_base(recorded.base, current.base)
    if not same:
        part = find_changed_part(recorded.base, current.base)
        differ = "its weight files differ from" if part in (None, "config") else f"its {part} differs from"
        what = "its weights cannot be compared with" if same is None else differ
        before = f"{recorded.base_model}, on which" if recorded.base_model != current.base_model else "those on which"
        problem = f"base_model={current.base_model}: {what} {before} {name} was trained"
        differences.append(Difference(problem, "the weights of base_model", "base_model"))
    tokenizer = "tokenizer" if "tokenizer" in current.data else "vocabulary"
    for part, setting, what in (("content", "dataset.path", "data"), (tokenizer, "model.tokenizer", "tokenizer")):
        digests = recorded.data.get(part), current.data.get(part)
        if None not in digests and digests[0] != digests[1]:
            problem = f"{setting}={current.names[setting]}: not the {what} that {name} was trained with"
            differences.append(Difference(problem, f"the {what}", "data"))
    if current.global_batch is not None and recorded.global_batch != current.global_batch:
        before = f"{recorded.global_batch} (training.global_batch_size: {recorded.global_batch})"
        problem = (
            f"{current.names['batch']} = {current.global_batch} samples per step: {name} was trained with {before}"
        )
        change = f"samples per step {recorded.global_batch} -> {current.global_batch}"
        differences.append(Difference(problem, change, "batch"))
    if current.ranks not in (None, recorded.ranks):
        differences.append(Difference("", f"ranks {recorded.ranks} -> {current.ranks}", None))
    return differences


def check_unchanged(config: RunConfig, folder: Path, *, needs_base: bool) -> None:
    """Raise UserError if anything changed since the adapter in `folder` was trained, or if its record is missing.

    The base model is not compared if it is neither needed nor on this machine.
    """
    changes = {name: "changed" if (folder / name).exists() else "deleted" for name in find_changed_files(folder)}
    problems = [f"{folder}: {name} was {change} after training; restore it" for name, change in changes.items()]
    recorded = read_recorded_identity(folder)
    if recorded is None:
        record = f"{RECORD}, which records the base model and settings of the run, is missing or incomplete; restore it"
        problems.append(f"{folder}: {record}")
    else:
        base = fingerprint_base(config.base_model, config.model)
        if needs_base and not base:
            load_model_config(config.base_model, config.model)  # downloads config.json, so that the commit is known
            base = fingerprint_base(config.base_model, config.model)
        current = Identity(settings=_collect_comparable_settings(_remove_adapter_path(config)))
        changed_settings = _list_problems(recorded, current, folder, MODEL_SETTINGS)
        problems += [f"{problem}; restore the setting" for problem in changed_settings]
        changed_base = _list_problems(recorded, Identity(base_model=config.base_model, base=base), folder)
        problems += [f"{problem}; pass that model with --base-model" for problem in changed_base]
    if problems:
        raise UserErrors([f"{problem}, or allow it with {ALLOW_MISMATCH_OPTION}" for problem in problems])


def check_held_out(config: RunConfig, folder: Path, origin: dict[str, str]) -> None:
    """Raise UserError if splitting the data again could hold out documents used in training."""
    recorded = read_recorded_identity(folder)
    if recorded is not None:
        settings = _collect_comparable_settings(_remove_adapter_path(config))
        content = {"content": origin["content"]}
        current = Identity(names={"dataset.path": _format_data_path(config)}, settings=settings, data=content)
        fix = f"documents used in training may be held out now; use other data (--data) or {ALLOW_MISMATCH_OPTION}"
        if problems := _list_problems(recorded, current, folder, SPLIT_SETTINGS):
            raise UserErrors([f"{problem}; {fix}" for problem in problems])


def is_training_data(folder: Path, origin: Mapping[str, str]) -> bool:
    """Return whether the data (`origin`) is what the run in `folder` was trained on."""
    recorded = read_recorded_identity(folder)
    return recorded is not None and recorded.data.get("content") == origin["content"]


def check_initial_adapter(config: RunConfig, origin: Mapping[str, str]) -> list[str]:
    """Check that the base model and tokenizer (`origin`) match the adapter at lora.adapter_path; return warnings.

    Raises UserError if they differ or the adapter changed after training, unless lora.allow_mismatch is set.
    """
    folder = Path(config.lora.adapter_path or "").expanduser()
    if config.adapter == "none" or not config.lora.adapter_path or not folder.is_dir():
        return []
    recorded = read_recorded_identity(folder)
    if recorded is None:
        base_name = read_adapter_settings(folder).get("base_model_name_or_path")
        if not base_name or Path(base_name).name.lower() == Path(config.base_model).name.lower():
            return []
        return [f"lora.adapter_path={folder}: its {SETTINGS} names {base_name}, but base_model is {config.base_model}"]
    current = build_identity(_remove_adapter_path(config), None, None, None)
    # Ignore the chat template: an adapter may be trained on text first, and then on conversations.
    current = current.model_copy(update={"data": {key: origin[key] for key in ("vocabulary",) if key in origin}})
    problems = _list_problems(recorded, current, folder, ("model.added_tokens",))
    if SETTINGS in find_changed_files(folder):
        problems.append(f"lora.adapter_path={folder}: {SETTINGS} was changed after training")
    if problems and not config.lora.allow_mismatch:
        fix = "undo the change, or allow it with lora.allow_mismatch: true"
        raise UserErrors([f"{problem}; {fix}" for problem in problems])
    return problems


def _list_problems(recorded: Identity, current: Identity, folder: Path, settings: tuple[str, ...] = ()) -> list[str]:
    compared_settings = {key: value for key, value in current.settings.items() if key.startswith(settings)}
    base = recorded.base if is_same_base(recorded.base, current.base) is None else current.base
    differences = find_differences(
        recorded, current.model_copy(update={"settings": compared_settings, "base": base}), str(folder)
    )
    return [difference.problem for difference in differences if difference.group or difference.fixed]


def _remove_adapter_path(config: RunConfig) -> RunConfig:
    """Remove the path of the initial adapter, which may have been deleted or changed since."""
    return config.model_copy(update={"lora": config.lora.model_copy(update={"adapter_path": None})})


def _format_data_path(config: RunConfig) -> str:
    data = config.dataset
    return data.path or ", ".join(str(source.path) for source in data.mix)


def _collect_comparable_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings to compare, keyed by dotted name, without disabled sections."""
    values = config.model_dump(mode="json")
    if config.lora.adapter_path is not None:
        # The initial adapter's settings replace the section's settings.
        values["lora"] = {name: value for name, value in values["lora"].items() if name not in PEFT_NAMES.values()}
        values["lora"] |= _read_initial_adapter_settings(config.lora)
    values["lora"]["init"] = values["lora"]["init"] if config.lora.init.startswith(("pissa", "olora")) else "default"
    disabled = {
        "lora": config.adapter == "none",
        "quantization": config.adapter != "qlora",
        "scu": not config.scu.enabled,
    }
    flat: dict[str, Any] = {"scu.enabled": config.scu.enabled}
    for name, value in values.items():
        if not isinstance(value, dict):
            flat[name] = value
        elif not disabled.get(name):
            flat |= {f"{name}.{key}": _normalize_value(f"{name}.{key}", inner) for key, inner in value.items()}
    return {name: value for name, value in flat.items() if name not in NOT_COMPARED}


def _normalize_value(name: str, value: Any) -> Any:
    """Sort layer names and drop the paths of data sources, because order and location do not matter."""
    if name in FIXED and isinstance(value, list) and name != "model.added_tokens":
        return sorted(value)
    if name == "dataset.mix":
        return [{key: inner for key, inner in source.items() if key != "path"} for source in value]
    if name == "dataset.evaluation" and value:
        return {key: inner for key, inner in value.items() if key != "path"}
    return value


def _read_initial_adapter_settings(lora: LoraSection) -> dict[str, Any]:
    if (folder := find_initial_adapter(lora)) is None:
        return {}
    saved = read_adapter_settings(folder)
    settings = {setting: saved[name] for name, setting in PEFT_NAMES.items() if name in saved}
    lists = ("target_modules", "exclude_modules", "modules_to_save")
    return {name: (value or [] if name in lists else value) for name, value in settings.items()}


def use_initial_adapter_settings(config: RunConfig) -> RunConfig:
    """Return the configuration with the rank, scale and layers of the adapter at lora.adapter_path."""
    known = _read_initial_adapter_settings(config.lora) if config.lora.adapter_path else {}
    update: dict[str, Any] = {name: known[name] for name in ("r", "alpha", "rslora", "dora") if name in known}
    if isinstance(layers := known.get("target_modules"), list):
        update["target_modules"] = tuple(sorted({get_last_components(layer, 1) for layer in layers}))
    return config.model_copy(update={"lora": config.lora.model_copy(update=update)})


@dataclass(frozen=True)
class Resumption:
    """The checkpoint to resume from (None for a fresh start), with warnings and notes for the user."""

    checkpoint: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plan_resumption(
    config: RunConfig,
    prepared: PreparedRun,
    *,
    world_size: int | None,
    precision: str | None = None,
    choice: CheckpointChoice | None = None,
) -> Resumption:
    """Choose the checkpoint to resume from, and check that it is intact and belongs to this run.

    `choice` is the result of an earlier `choose_checkpoint(..., verify=True)`. Raises UserErrors with all differences
    that are not allowed, including differences between the base model and an initial adapter.
    """
    training = config.training
    if choice is None:
        choice = choose_checkpoint(training.resume_from_checkpoint, Path(config.output_dir), verify=True)
    warnings = () if choice.warning is None else (choice.warning,)
    checkpoint = choice.checkpoint
    if checkpoint is None:
        return Resumption(None, (*warnings, *check_initial_adapter(config, prepared.data.origin)))
    state, recorded = read_state(checkpoint), read_recorded_identity(checkpoint)
    notes = []
    if recorded is not None:
        current = build_identity(config, prepared, world_size, precision)
        rejected, note = compare_identities(recorded, current, checkpoint, training.resume_changes)
        if rejected:
            raise UserErrors(rejected)
        notes += [note] if note else []
    else:
        notes.append(f"{checkpoint.name} has no record of its run: model, data and settings were not compared")
    if training.max_steps is not None and int(state["step"]) >= training.max_steps:
        notes.append(describe_finished_run(int(state["step"]), training.max_steps))
    return Resumption(checkpoint, warnings, tuple(notes))


def describe_finished_run(step: int, total_steps: int) -> str:
    return (
        f"the checkpoint is at step {step}, and training.max_steps or epochs ends the run at step {total_steps}, so "
        "nothing is left to train; raise max_steps or epochs"
    )


def compare_identities(
    recorded: Identity, current: Identity, checkpoint: Path, allowed: tuple[str, ...]
) -> tuple[list[str], str | None]:
    """Return a message for each rejected difference, and one note that lists the allowed differences, or None."""
    rejected, changed = [], []
    for difference in find_differences(recorded, current, checkpoint.name):
        if difference.fixed:
            weights = "base_model" if recorded.settings.get("adapter") == "none" else "lora.adapter_path"
            rejected.append(
                f"{difference.problem}, which its optimizer state requires; restore it, or start a new run "
                f"with {weights}: {checkpoint}"
            )
        elif difference.group is None or difference.group in allowed:
            changed.append(difference.change)
        else:
            fix = f"restore it, or allow the change with training.resume_changes: [{difference.group}]"
            rejected.append(f"{difference.problem}; {fix}")
    return rejected, f"changed since {checkpoint.name}: {', '.join(changed)}" if changed else None
