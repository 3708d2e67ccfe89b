"""Suggest changes to configurations that do not fit in memory, and show how much memory each would need."""

from trainer.config import RunConfig
from trainer.memory.planner import Changes, PlanChoice, Planner, format_gib

MAX_SUGGESTIONS = 3


def suggest_changes(planner: Planner, config: RunConfig, memory: int) -> list[PlanChoice]:
    """Return up to three changes that need less memory.

    Single changes that fit come first, then a combination that fits, then the changes that save the most.
    """
    needed = planner.estimate(config).needed
    choices = (planner.try_changes(config, changes) for changes in _list_candidates(planner, config, memory))
    singles = [choice for choice in choices if choice.needed < needed]
    fitting = [choice for choice in singles if choice.needed <= memory]
    if len(fitting) < MAX_SUGGESTIONS:
        fitting += _combine_changes(planner, config, memory, singles)
    others = sorted((choice for choice in singles if choice not in fitting), key=lambda choice: choice.needed)
    return (fitting + others)[:MAX_SUGGESTIONS]


def describe_memory_shortage(planner: Planner, config: RunConfig, memory: int, verb_phrase: str) -> str:
    """Return an error message with the needed and the available memory, and suggested changes.

    `verb_phrase` comes before the available memory, such as `can use`.
    """
    estimate = planner.estimate(config)
    advice = suggest_changes(planner, config, memory)
    enough = "; or ".join(str(option) for option in advice if option.needed <= memory)
    less = "; ".join(str(option) for option in advice if option.needed > memory)
    if not advice:
        fix = "use a smaller model or a larger GPU"
    elif not enough:
        fix = f"no change is enough (most helpful: {less}); use a smaller model or a larger GPU"
    else:
        fix = f"set {enough}" + (f"; helpful but not enough: {less}" if less else "")
    largest = max(estimate.terms, key=lambda name: estimate.terms[name])
    return (
        f"memory: each GPU needs {format_gib(estimate.needed)} ({format_gib(estimate.terms[largest])} of it for "
        f"{largest}), but {verb_phrase} {format_gib(memory)}; {fix}"
    )


def _list_candidates(planner: Planner, config: RunConfig, memory: int) -> list[Changes]:
    training = config.training
    candidates: list[Changes] = []
    if training.batch_size > 1:
        limit = planner.find_largest_batch(config, memory) or 1
        changes = find_smaller_batch(training.batch_size, training.gradient_accumulation_steps, limit)
        if training.global_batch_size is not None:
            changes.pop("training.gradient_accumulation_steps")
        candidates.append(changes)
    if training.gradient_checkpointing_layers is not None:
        candidates.append({"training.gradient_checkpointing_layers": None})
    elif training.gradient_checkpointing != "non_reentrant":
        candidates.append({"training.gradient_checkpointing": "non_reentrant"})
    elif not training.offload_activations:
        candidates.append({"training.offload_activations": True})
    if planner.machine.world_size > 1 and config.zero.stage < 3:
        candidates.append({"zero.stage": 3})
    if config.zero.stage == 3 and config.zero.gather == "module":
        candidates.append({"zero.gather": "auto"})
    if planner.build_decisions(config).shard_group.reason:
        candidates.append({"zero.shard_within": "all"})
    if config.adapter == "lora":
        candidates.append({"adapter": "qlora"})
    if not config.zero.offload_optimizer:
        candidates.append(({"zero.stage": 1} if config.zero.stage == 0 else {}) | {"zero.offload_optimizer": True})
    if training.optimizer == "adamw":
        candidates.append({"training.optimizer": "adamw_8bit"})
    if not config.zero.offload_parameters:
        candidates.append({"zero.stage": 3, "zero.offload_optimizer": True, "zero.offload_parameters": True})
    if half := planner.halve_samples(config):
        candidates.append(half)
    return candidates


def _combine_changes(planner: Planner, config: RunConfig, memory: int, singles: list[PlanChoice]) -> list[PlanChoice]:
    """Combine changes one by one until the configuration fits; return an empty list if it never does."""
    changes: Changes = {}
    for single in singles:
        stages = [settings["zero.stage"] for settings in (changes, single.changes) if "zero.stage" in settings]
        changes = changes | single.changes | ({"zero.stage": max(stages)} if stages else {})
        choice = planner.try_changes(config, changes)
        if len(changes) > 1 and choice.needed <= memory:
            return [choice]
    return []


def find_smaller_batch(batch_size: int, accumulation: int, limit: int) -> Changes:
    """Return the settings for the largest micro-batch up to `limit` that keeps the global batch size unchanged."""
    rows = batch_size * accumulation
    size = next(size for size in range(max(1, min(limit, batch_size)), 0, -1) if rows % size == 0)
    return {"training.batch_size": size, "training.gradient_accumulation_steps": rows // size}
