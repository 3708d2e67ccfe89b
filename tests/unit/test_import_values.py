"""`zerolora import` of values of any type: what does not fit is a mistake, and no key is lost without a word."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.importing import axolotl, common, llamafactory, trl
from launcher.importing.command import format_yaml, translate_arguments
from launcher.importing.translation import KeyMapping
from tests.imported import as_tree, nest
from trainer.config import UserError, load_config
from trainer.config.yaml_core import read_yaml

AXOLOTL = {
    "base_model": "org/small",
    "datasets": [{"path": "org/tales", "type": "chat_template"}],
    "adapter": "lora",
    "micro_batch_size": 1,
    "sequence_len": 64,
    "learning_rate": 1e-4,
}
FACTORY = {
    "model_name_or_path": "org/small",
    "stage": "sft",
    "finetuning_type": "lora",
    "template": "chatml",
    "cutoff_len": 64,
    "dataset": "pairs",
}
TRL = {"model_name_or_path": "org/small", "dataset_name": "org/tales", "use_peft": True}
TABLES = {
    "axolotl": (AXOLOTL, axolotl.KEYS),
    "llamafactory": (FACTORY, llamafactory.KEYS),
    "trl": (TRL, trl.KEYS),
}
ENTRY = {
    "file_name": "pairs.json",
    "columns": {"prompt": "ask"},
    "tags": {"role_tag": "role"},
    "formatting": "alpaca",
}
INNER = ("path", "type", "name", "field_messages", "roles", "data_files", "train_on_eos", "stage", "zero_optimization",
         "offload_param", "fsdp_offload_params", "zero_stage", "deepspeed_config", "distributed_type")  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["none", "false", "auto", "lora", "steps", "1e-4", "zero3.json", "10", "a, b", "q_proj|k_proj"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


few = settings(max_examples=50, deadline=None, derandomize=True)


def fit(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of the type that a key has."""
    if isinstance(kind, tuple):
        return st.one_of(*map(fit, kind))
    if isinstance(kind, dict):
        inner = {name: fit(inner) for name, inner in kind.items() if name != "*"}
        return st.fixed_dictionaries({}, optional=inner or {"a": fit(kind["*"])})
    return st.lists(fit(kind[0]), max_size=3) if isinstance(kind, list) else SCALARS


def check_import(tree: dict[str, Any], folder: Path) -> None:
    """Import a file; what is written must be valid and name every key, or each mistake must name one."""
    file = folder / "theirs.yml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    try:
        translation = translate_arguments([str(file)])
    except UserError as error:
        assert all(line.startswith(str(file)) for line in str(error).split("\nerror: ")), error
        return
    text = format_yaml(translation, "mine.yaml")
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    load_config(folder / "mine.yaml")
    assert read_yaml(folder / "mine.yaml").tree == as_tree(translation)
    missing = [name for name in tree if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)]
    assert not missing, f"{missing} of {tree}\n{text}"


@pytest.mark.parametrize("trainer", TABLES)
@few
@given(data=st.data())
def test_any_value_of_any_key(trainer: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    base, table = TABLES[trainer]
    folder = tmp_path_factory.mktemp("any", numbered=True)
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"pairs": ENTRY}))
    known = {name: key for name, key in table.items() if not name.endswith("*")} | {"missing": KeyMapping()}
    names = data.draw(st.lists(st.sampled_from(list(known)), min_size=1, max_size=4, unique=True))
    changed = {name: data.draw(VALUES | fit(known[name].kind)) for name in names}
    check_import({**base, **nest(changed)}, folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dataset_info.json", {"pairs": llamafactory.ENTRY_TYPE}),
        ("ds.json", common.SHARDING_CONFIG),
        ("fsdp.json", common.SHARDING_CONFIG["fsdp_config"]),
    ],
)
@few
@given(data=st.data())
def test_any_content_of_a_file_that_a_file_names(
    name: str, kind: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("named", numbered=True)
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"pairs": ENTRY}))
    (folder / "data" / name).write_text(json.dumps(data.draw(fit(kind) | VALUES)))
    named = {"ds.json": {"deepspeed": "data/ds.json"}, "fsdp.json": {"fsdp_config": "data/fsdp.json"}}
    check_import({**FACTORY, **named.get(name, {})}, folder)


@few
@given(data=st.data())
def test_any_configuration_of_accelerate(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("accelerate", numbered=True) / "acc.yaml"
    content = data.draw(VALUES | fit(common.SHARDING_CONFIG))
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    launch = ["accelerate", "launch", "--config_file", str(file), "sft.py", "--model_name_or_path", "m"]
    try:
        format_yaml(translate_arguments([*launch, "--dataset_name", "d"]), "mine.yaml").encode()
    except UserError as error:
        assert str(file) in str(error), error


# Files as they may be found: cut, in another encoding, or with a type that YAML alone has.
NAMED = {
    "theirs.yml": "base_model: org/small\ndatasets:\n  - {path: org/tales, type: chat_template}\nadapter: lora\n",
    "data/dataset_info.json": json.dumps({"pairs": ENTRY}),
    "data/ds.json": '{"zero_optimization": {"stage": 3}}',
}
PIECES = (
    "\t", "{", "[", "]", "!!python/object:os.system x", "!!binary YQ==", "&a *a", "<<: *b", "? ", "2024-01-01", "\x00",
    "\x85", "---\n", "%YAML 9", "0x1f", "!x", "1e999", "- ", ": ", "\xe9",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@few
@given(
    at=st.integers(0, 90),
    cut=st.integers(0, 9),
    piece=st.binary(max_size=9) | st.sampled_from(PIECES).map(lambda piece: piece.encode("latin-1")),
)
def test_any_bytes_of_an_imported_file(
    name: str, at: int, cut: int, piece: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bytes", numbered=True)
    (folder / "data").mkdir()
    (folder / "theirs.yml").write_text(yaml.safe_dump(FACTORY | {"deepspeed": "data/ds.json"}))
    (folder / "data" / "dataset_info.json").write_text(NAMED["data/dataset_info.json"])
    whole = NAMED[name]
    start = at % (len(whole) + 1)
    (folder / name).write_bytes(whole[:start].encode() + piece + whole[start + cut :].encode())
    try:
        format_yaml(translate_arguments([str(folder / "theirs.yml")]), "mine.yaml").encode()
    except UserError as error:
        assert str(folder) in str(error) and "Traceback" not in str(error), error


@few
@given(options=st.dictionaries(st.sampled_from([*trl.KEYS]), st.lists(SCALARS.map(str), max_size=2), max_size=4))
def test_any_command_line(options: dict[str, list[str]]) -> None:
    arguments = ["sft.py", "--model_name_or_path", "m", "--dataset_name", "d"]
    for name, values in options.items():
        arguments += [f"--{name}", *values]
    try:
        format_yaml(translate_arguments(arguments), "mine.yaml").encode()
    except UserError as error:
        assert str(error)
