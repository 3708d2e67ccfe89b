"""`model.rope_scaling`: longer sequences, computed as transformers does, and written into what is merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from tests.tiny import make_model
from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.commands.serve import Server, prepare_server_command
from trainer.config import ModelSection, UserError
from trainer.model.base import get_context_length, load_model_config

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 256, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_scaling_it_was_trained_with(kind: str, tmp_path: Path) -> None:
    run = find_run(make_run(tmp_path, model={"rope_scaling": {"type": kind, "factor": 4}}))
    output = merge(run, tmp_path / "merged")
    written = json.loads((output / "config.json").read_text())
    assert written["max_position_embeddings"] == 1024
    assert {name: value for name, value in written["rope_parameters"].items() if name != "rope_theta"} == KINDS[kind]
    adapted = load_trained_model(run, load_saved_tokenizer(run), torch.device("cpu"))
    merged = AutoModelForCausalLM.from_pretrained(output)
    tokens = torch.randint(1, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = adapted(tokens).logits, merged(tokens).logits
        merged.config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        unscaled = type(merged)(merged.config)
        unscaled.load_state_dict(merged.state_dict())
        assert (unscaled(tokens).logits - logits).abs().max() > 1e-4, "the scaling does something"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_length_that_is_given_replaces_the_models(tmp_path: Path) -> None:
    section = ModelSection.model_validate(
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 128}}
    )
    assert get_context_length(load_model_config(str(make_model(tmp_path / "model")), section)) == 256


def test_models_without_one_rotary_embedding_are_refused(tmp_path: Path) -> None:
    Gemma3TextConfig().save_pretrained(tmp_path)
    section = ModelSection.model_validate({"rope_scaling": {"type": "linear", "factor": 2}})
    with pytest.raises(UserError, match=r"model.rope_scaling.type=linear: gemma3_text has no single rotary embedding"):
        load_model_config(str(tmp_path), section)


def test_an_adapter_is_not_served_on_the_base_without_the_scaling(tmp_path: Path) -> None:
    run = find_run(make_run(tmp_path, model={"rope_scaling": {"type": "yarn", "factor": 4}}))
    with pytest.raises(UserError, match=r"model.rope_scaling.type=yarn: .*; pass --merged"):
        prepare_server_command(run, Server("vllm", ("vllm",)), tmp_path, merged=False)
