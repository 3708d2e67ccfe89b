"""`zerolora config --schema` and `--json-schema`."""

from typing import Any

import pytest

from trainer.config.messages import list_setting_names
from trainer.config.settings_reference import build_json_schema, format_reference


def test_every_setting_has_its_entry() -> None:
    heads = {line.split(":")[0] for line in format_reference(100).splitlines() if line and line[0] not in " #"}
    assert heads == set(list_setting_names())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    long = [line for line in format_reference(width).splitlines() if len(line) > width and not line.startswith("#")]
    assert long == []


@pytest.mark.parametrize(
    "entry",
    [
        "base_model: string (required)",
        "adapter: lora | qlora | none (default lora)",
        "lora.r: integer >= 1, <= 32768 (default 16)",
        "lora.dropout: number >= 0.0, < 1.0 (default 0.0)",
        "lora.loraplus_lr_ratio: number >= 1.0, <= 10000.0 | none (default none)",
        "lora.target_modules: list of string (default [all-linear])",
        "dataset.fields: mapping of string to string (default {})",
        "dataset.mix: list of source section (default [])",
        "scu.target: number > 0.0, <= 1000.0 | auto (default auto)",
        "zero.stage: auto | 0 | 1 | 2 | 3 (default 2)",
    ],
)
def test_entries_carry_type_range_and_default(entry: str) -> None:
    assert entry in format_reference(120).splitlines()


def test_meaning_and_other_names_stand_below() -> None:
    lines = format_reference(120).splitlines()
    below = lines[lines.index("lora.r: integer >= 1, <= 32768 (default 16)") + 1 :]
    assert (
        " ".join(below[:2]).split()
        == (
            "Rank of the adapter: higher ranks can learn more and take more memory; 8 to 64 are usual. "
            "Also read: lora_r, lora_rank."
        ).split()
    )


def definitions(name: str) -> dict[str, Any]:
    properties: dict[str, Any] = build_json_schema()["$defs"][name]["properties"]
    return properties


def test_the_json_schema_allows_what_the_loader_allows() -> None:
    assert {"type": "string"} in definitions("LoraSection")["target_modules"]["anyOf"]
    assert True in definitions("TrainingSection")["gradient_checkpointing"]["enum"]
    rank = definitions("LoraSection")["r"]
    assert {key: rank[key] for key in rank if key != "description"} == {
        "default": 16, "minimum": 1, "maximum": 32768, "title": "R", "type": "integer",
    }  # fmt: skip
    assert build_json_schema()["required"] == ["base_model", "dataset"]
    assert build_json_schema()["additionalProperties"] is False
