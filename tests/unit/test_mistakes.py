"""Mistakes of settings are records: one never hides another that does not depend on it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config import UserError, load_config
from trainer.config.errors import Mistake, UserErrors
from trainer.config.messages import list_setting_names
from trainer.config.scu_flags import build_settings, load_flag_config, parse_flags

GOOD: dict[str, Any] = {"base_model": "some/model", "output_dir": "runs/x", "dataset.path": "data.jsonl"}
# Combinations that cannot work: their settings, and the beginning of the line.
COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"dataset.batching": "tokens", "dataset.packing": True},
        "dataset.batching=tokens: packed sequences have no padding to avoid",
    ),
    (
        {"training.torch_compile": True, "zero.stage": 3},
        "training.torch_compile=true: the gathers of zero.stage=3 break",
    ),
    (
        {"scu.enabled": True, "scu.lambda_min": 5, "scu.lambda_max": 2},
        "scu.lambda_min=5: must be below scu.lambda_max",
    ),
    ({"training.warmup_steps": 20, "training.max_steps": 10}, "training.warmup_steps=20: must be below"),
    ({"training.elastic": True, "training.max_restarts": 0}, "training.elastic=true: needs restarts"),
    ({"training.lr_scheduler": "linear", "training.min_lr_ratio": 0.1}, "training.min_lr_ratio=0.1: has no effect"),
    ({"lora.init": "loftq", "adapter": "lora"}, "lora.init=loftq: needs a 4-bit base"),
    ({"logging.report_to": ["none", "wandb"]}, "logging.report_to=[none, wandb]: none cannot be combined"),
]


def find_mistakes(path: Path, given: dict[str, Any], *overrides: str) -> list[str]:
    tree: dict[str, Any] = {}
    for name, value in (GOOD | given).items():
        *above, last = name.split(".")
        node = tree
        for section in above:
            node = node.setdefault(section, {})
        node[last] = value
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value).split("\nerror: ")


@pytest.mark.parametrize(
    ("wrong", "combination"),
    [("scu.tokens=abc", 0), ("scu.every=abc", 1), ("export.target=abc", 0), ("zero=5", 5), ("lora.dropout=[1]", 7)],
)
def test_a_wrong_setting_hides_no_other_mistake(tmp_path: Path, wrong: str, combination: int) -> None:
    given, line = COMBINATIONS[combination]
    found = find_mistakes(tmp_path / "x.yaml", given, wrong)
    assert len(found) == 2 and found[0].startswith(line) and found[1].startswith(f"{wrong}: must be ")


def test_two_independent_mistakes_are_always_two_lines(tmp_path: Path) -> None:
    """Each two neighbouring settings are wrong in a file with eight invalid combinations of others."""
    names = list_setting_names()
    combined = {name: value for given, _ in COMBINATIONS for name, value in given.items()}
    for wrong in zip(names, names[1:] + names[:1], strict=True):
        # No setting accepts this; a map of any keys refuses its value, or is given as a number.
        found = find_mistakes(
            tmp_path / "x.yaml",
            combined | {name: 3.5 if name in MAPS else {"a key": [{}]} for name in wrong},
        )
        for name in wrong:
            assert any(line.startswith((f"{name}=", f"{name}.")) for line in found), (name, found)
        for given, line in COMBINATIONS:
            if not given.keys() & {*wrong}:
                assert any(each.startswith(line) for each in found), (wrong, line, found)


MAPS = ("zero.extra", "dataset.chat_template_kwargs", "dataset.evaluation", "image.prior", "model.rope_scaling")


@pytest.mark.parametrize(
    ("given", "wrong", "hidden"),
    [
        ({"adapter": "lora", "lora.init": "loftq"}, "adapter=5", "lora.init=loftq"),
        ({"zero.gather": "layer"}, "zero=5", "zero.gather=layer"),
        ({"training.offload_activations": True}, "training.gradient_checkpointing=5", "training.offload_activations"),
        ({"training.early_stopping": 3}, "dataset.val_split=abc", "training.early_stopping=3: no data is held out"),
    ],
)
def test_a_mistake_that_depends_on_a_wrong_setting_waits_for_it(
    tmp_path: Path, given: dict[str, Any], wrong: str, hidden: str
) -> None:
    assert [line for line in find_mistakes(tmp_path / "x.yaml", given) if line.startswith(hidden)]
    (found,) = find_mistakes(tmp_path / "x.yaml", given, wrong)
    assert found.startswith(wrong)


def test_a_misspelled_name_is_not_also_reported_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base_modl: m\noutput_dir: x\ndataset: {pth: d}\n")
    with pytest.raises(UserErrors) as caught:
        load_config(path)
    lines = caught.value.messages
    assert [line.partition(":")[0] for line in lines] == ["base_modl", "dataset.pth"]
    first = caught.value.mistakes[0]
    assert isinstance(first, Mistake) and first.involves == "base_model" and first.fix == "did you mean base_model?"


def test_a_flag_of_the_guide_is_named_only_for_its_own_setting(tmp_path: Path) -> None:
    options = parse_flags(["--lora-r", "0", "--data", "d.jsonl", "lora.rank_pattern={q_proj: 0}"])
    path = tmp_path / "scu.yaml"
    path.write_text(yaml.safe_dump(build_settings(options, "d.jsonl", None)))
    with pytest.raises(UserErrors) as caught:
        load_flag_config(path, options)
    named = {line.partition(":")[0] for line in caught.value.messages}
    assert named == {"--lora-r=0", "lora.rank_pattern.q_proj=0"}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ({"lora.rank": "abc"}, "lora.rank=abc: must be a whole number"),  # its own name is `lora.r`
        ({"training.lr_scheduler_type": "abc"}, "training.lr_scheduler_type=abc: must be 'linear'"),
        ({"test_datasets": 5}, "test_datasets=5: must be a section; write `dataset.evaluation.path=...`"),
    ],
)
def test_a_mistake_has_the_name_that_was_typed(tmp_path: Path, typed: dict[str, Any], line: str) -> None:
    (found,) = find_mistakes(tmp_path / "x.yaml", typed)
    assert found.startswith(line)
