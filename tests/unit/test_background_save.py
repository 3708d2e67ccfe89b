"""The thread that writes checkpoints during training: files straight from memory, without PEFT."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.runs_in_process import make_ground, train
from trainer.checkpoint.adapter_files import AdapterFormat, NotReloadableError
from trainer.checkpoint.checkpoint_files import compute_checksum
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.tensor_writer import write_tensors
from trainer.checkpoint.weights import gather_weights, write_adapter
from trainer.model.saved_adapter import load_on_empty_base


def content(files: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (value.dtype, value.shape, value.tolist()) for name, value in files.items()}


def test_more_tensors_than_one_call_takes_are_written_though_the_system_takes_them_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{number}": torch.full((number % 3, 5), float(number)) for number in range(1700)}
    tensors |= {"odd": torch.arange(7, dtype=torch.uint8), "one": torch.tensor(3, dtype=torch.int64)}
    write, calls = os.writev, []

    def grudging(descriptor: int, buffers: list[memoryview]) -> int:
        calls.append(len(buffers))
        return write(descriptor, [*buffers[:3], buffers[3][:1]] if len(buffers) > 3 else [buffers[0][:5]])

    assert write_tensors(tmp_path / "whole", tensors, {"format": "pt"}) == compute_checksum(tmp_path / "whole")
    monkeypatch.setattr(os, "writev", grudging)
    write_tensors(tmp_path / "bits", tensors, {"format": "pt"})
    assert max(calls) == 1024
    assert (tmp_path / "bits").read_bytes() == (tmp_path / "whole").read_bytes()
    assert content(load_file(tmp_path / "whole")) == content(tensors)
    with safe_open(str(tmp_path / "whole"), framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_copies_of_every_save_lie_in_the_same_memory() -> None:
    tensors = {"m": torch.randn(40), "n": torch.randn(3, 5).bfloat16(), "z": torch.randn(8, 6).T, "e": torch.ones(0)}
    copies = HostCopies()
    first = {name: copies.copy(name, value) for name, value in tensors.items()}
    copies.record_event()
    copies.wait()
    assert content(first) == content(tensors)
    before = {name: value.clone() for name, value in tensors.items()}
    for value in tensors.values():
        value.add_(1)
    assert content(first) == content(before)
    second = {name: copies.copy(name, value) for name, value in tensors.items()}
    assert content(second) == content(tensors)
    assert [value.data_ptr() for value in second.values()] == [value.data_ptr() for value in first.values()]
    grown = copies.copy("m", torch.ones(4000))  # of another shape
    assert grown.tolist() == [1.0] * 4000 and content(second) == content(tensors)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_is_written_as_peft_writes_it(tmp_path: Path, dora: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    settings: dict[str, Any] = {"target_modules": "all-linear", "exclude_modules": "lm_head", "use_dora": dora}
    more: dict[str, Any] = {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [1, 5]}}
    config = LoraConfig(r=4, rank_pattern={"q_proj": 2}, task_type="CAUSAL_LM", **settings, **more)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)), config)
    trained = gather_weights(model)
    for value in trained.values():
        value.normal_()
    write_adapter(AdapterFormat.from_model(model, trained), trained, tmp_path / "ours", require_nonzero_b=True)
    model.save_pretrained(tmp_path / "theirs", state_dict=trained)
    theirs = tmp_path / "theirs"
    expected = load_file(theirs / "adapter_model.safetensors")
    assert len(expected) == len(trained) and any("token_adapter" in name for name in expected)
    assert content(load_file(tmp_path / "ours/adapter_model.safetensors")) == content(expected)
    assert (tmp_path / "ours/adapter_config.json").read_text() == (theirs / "adapter_config.json").read_text()
    broken = {name: value.clone() for name, value in trained.items()}
    last = next(name for name in broken if "lora_B" in name)
    broken[last].view(-1)[0] = float("inf")
    with pytest.raises(RuntimeError, match=r"lora_B\.weight has NaN or inf; the last good weights"):
        write_adapter(AdapterFormat.from_model(model, trained), broken, tmp_path / "broken", require_nonzero_b=True)
    with pytest.raises(RuntimeError, match="every lora_B is still zero"):
        still = {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in trained.items()}
        write_adapter(AdapterFormat.from_model(model, trained), still, tmp_path / "still", require_nonzero_b=True)


def test_peft_is_asked_once_in_a_run_how_it_stores_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_ground(tmp_path)
    save, asked = PeftModel.save_pretrained, []

    def counted(model: PeftModel, where: str, **options: Any) -> None:
        asked.append(where)
        save(model, where, **options)

    monkeypatch.setattr(PeftModel, "save_pretrained", counted)
    train(folder, training__save_steps=1, training__max_steps=3)
    assert len(list((folder / "run").glob("checkpoint-*/adapter_model.safetensors"))) == 3
    assert len(asked) == 1 and not Path(asked[0]).is_relative_to(folder)


def test_peft_loads_the_adapter_once_in_a_run_and_what_it_would_not_take_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loads = make_ground(tmp_path), []

    def count_loads(*arguments: Any) -> None:
        loads.append(arguments[1]["r"])
        load_on_empty_base(*arguments)

    def wrap_unpatched(*arguments: Any, **options: Any) -> Any:
        # Libraries replace these for all threads while they build an empty model.
        assert (nn.init.normal_, nn.Module.register_parameter) == originals
        return get_peft_model(*arguments, **options)

    originals = nn.init.normal_, nn.Module.register_parameter
    monkeypatch.setattr("trainer.checkpoint.adapter_files.load_on_empty_base", count_loads)
    monkeypatch.setattr("peft.get_peft_model", wrap_unpatched)
    train(folder, training__save_steps=1, training__max_steps=3)
    assert loads == [4]  # three checkpoints and the result

    def write_fewer(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
        if path.name == "adapter_model.safetensors" and "checkpoint-5" in str(path):
            tensors = dict(list(tensors.items())[1:])
        return write_tensors(path, tensors, metadata)

    monkeypatch.setattr("trainer.checkpoint.weights.write_tensors", write_fewer)
    settings: dict[str, Any] = {"training__resume_from_checkpoint": "latest", "training__save_total_limit": None}
    with pytest.raises(NotReloadableError, match=r"^checkpoint-5 was not saved: .*1 tensors .* not in the file"):
        train(folder, training__save_steps=1, training__max_steps=8, **settings)
    assert sorted(path.name for path in (folder / "run").glob("*checkpoint-*")) == [
        f"checkpoint-{step}" for step in range(1, 5)
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("names", r"1 of the 10 tensors .* match no layer .first: .*q_prof"),
        ("targets", r"4 of the 9 tensors .* match no layer .first: .*k_proj"),
        ("rank", r"q_proj.* has shape .* in the adapter, but"),
        ("rows", r"embed_tokens"),
        ("none", ""),
    ],
)
def test_an_adapter_that_peft_would_not_load_whole_is_not_saved(tmp_path: Path, change: str, problem: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    rows: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": [1, 5]}, "target_modules": ["q_proj", "k_proj"]}
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)), LoraConfig(r=4, **rows))
    trained = gather_weights(model)
    form = AdapterFormat.from_model(model, trained)
    names, settings = dict(form.names), json.loads(form.settings)
    first = next(name for name in names if "q_proj.lora_A" in name)
    if change == "names":
        names[first.replace("q_proj", "q_prof")] = names[first]
    elif change == "targets":
        settings["target_modules"] = ["q_proj"]
    elif change == "rank":
        settings["r"] = 8
    elif change == "rows":
        names = {name: source for name, source in names.items() if "token" not in name}
    changed = replace(form, names=names, settings=json.dumps(settings))
    expected = pytest.raises(NotReloadableError, match=problem) if problem else nullcontext()
    with expected:
        write_adapter(changed, trained, tmp_path, require_nonzero_b=False)
