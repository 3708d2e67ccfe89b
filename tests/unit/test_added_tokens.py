"""Rows of new tokens: trained in the embedding and in an untied output head, as plain PEFT trains them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.plain_peft import plain_losses
from tests.runs_in_process import make_ground, train
from tests.tiny import make_model
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands.merged_model import merge
from trainer.config import LoraSection, ModelSection, UserError, load_config
from trainer.model.adapter import apply_adapter, check_added_tokens, find_token_layers
from trainer.model.base import build_empty_model

CPU = torch.device("cpu")
WORDS = "red green blue seven eight nine runs jumps".split()
STEPS = 50
SETTINGS: dict[str, Any] = {
    "model__added_tokens": ["<a1>", "<a2>"],
    "training__max_steps": STEPS,
    "training__batch_size": 8,
    "training__learning_rate": 1e-2,
    "training__save_steps": STEPS // 2,
    "ops__backend": "reference",
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": ({}, {}),
    "untied-stage2-grown": ({"vocab_size": 327}, {"zero__stage": 2}),
    "untied-stage3-packed": ({}, {"zero__stage": 3, "dataset__packing": True, "dataset__max_length": 32}),
    "tied": ({"tie_word_embeddings": True}, {"zero__stage": 1}),
    "untied-nf4": ({}, {"adapter": "qlora"}),
}


def answer(words: list[str]) -> str:
    """Return the new token that answers a question: which half of WORDS its first word is from."""
    return "<a1>" if words[0] in WORDS[: len(WORDS) // 2] else "<a2>"


def make_questions(folder: Path, **llama: Any) -> Path:
    """Write a tiny model and questions with the answers <a1> and <a2>, half of each."""
    make_ground(folder)
    make_model(folder / "model", **llama)
    draw = random.Random(0)
    questions = [[WORDS[index % 8], draw.choice(WORDS), draw.choice(WORDS)] for index in range(40)]
    lines = [json.dumps({"prompt": f"{' '.join(words)} ", "completion": answer(words)}) for words in questions]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def answers_right(model: Any, tokenizer: Any, questions: Path) -> int:
    """Return how many questions the model answers with the right one of the new tokens."""
    right, new = 0, tokenizer.convert_tokens_to_ids(["<a1>", "<a2>"])
    for record in map(json.loads, questions.read_text().splitlines()):
        ids = tokenizer(record["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        right += ("<a1>", "<a2>")[int(logits[new].argmax())] == record["completion"]
    return right


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_are_learned_as_input_and_output(kind: str, tmp_path: Path) -> None:
    llama, more = KINDS[kind]
    ground = make_questions(tmp_path, **llama)
    console = train(ground, **SETTINGS, **more)
    assert "materialize" not in console, "head and loss are computed together"
    run = find_run(tmp_path / "run")
    tokenizer = load_saved_tokenizer(run)
    model = load_trained_model(run, tokenizer, CPU)
    assert answers_right(model, tokenizer, tmp_path / "train.jsonl") == 40
    rows = {name: value.shape for name, value in load_file(run.folder / "adapter_model.safetensors").items()}
    trained = [name for name, shape in rows.items() if "trainable_tokens" in name and shape == (2, 64)]
    assert len(trained) == (1 if llama.get("tie_word_embeddings") else 2)
    if run.config.adapter == "lora":
        settings = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in (SETTINGS | more).items()]
        config = load_config(tmp_path / "base.yaml", [*settings, f"output_dir={tmp_path / 'plain'}"]).config
        assert losses(run.run_dir) == pytest.approx(plain_losses(config, ranks=1, device=CPU), rel=1e-4, abs=1e-6)


def test_rows_are_saved_for_plain_peft_merged_and_resumed(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ground = make_questions(tmp_path)
    train(ground, **SETTINGS)
    run = find_run(tmp_path / "run")
    tokenizer, tokens = load_saved_tokenizer(run), torch.tensor([[5, 9, 327, 31, 328, 7]])
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), run.folder)
    merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged"))
    with torch.no_grad():
        expected = load_trained_model(run, tokenizer, CPU)(tokens).logits
        for model in (plain, merged):
            torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-5)
    whole = load_file(run.folder / "adapter_model.safetensors")
    checkpoint = str(tmp_path / "run" / f"checkpoint-{STEPS // 2}")
    train(ground, **SETTINGS, training__resume_from_checkpoint=checkpoint, output_dir=str(tmp_path / "again"))
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


IN_FULL: dict[str, tuple[bool, dict[str, Any], list[str]]] = {
    "untied": (False, {}, ["lm_head", "model.embed_tokens"]),
    "untied, head in full": (False, {"modules_to_save": ["lm_head"]}, ["model.embed_tokens"]),
    "untied, head adapted": (False, {"target_modules": ["q_proj", "lm_head"]}, ["model.embed_tokens"]),
    "untied, embedding adapted": (False, {"target_modules": ["q_proj", "embed_tokens"]}, ["lm_head"]),
    "tied": (True, {}, ["model.embed_tokens"]),
    "tied, embedding in full": (True, {"modules_to_save": ["embed_tokens"]}, ["lm_head"]),
    "tied, both in full": (True, {"modules_to_save": ["embed_tokens", "lm_head"]}, []),
}


@pytest.mark.parametrize("case", IN_FULL)
def test_rows_are_trained_where_nothing_else_trains_them(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tied, lora, expected = IN_FULL[case]
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, tie_word_embeddings=tied))
    section = LoraSection(r=4, **lora)
    assert sorted(find_token_layers(model, section)) == expected
    adapted = apply_adapter(model, section, torch.float32, [380, 381])
    adapted(input_ids=torch.tensor([[5, 380, 7, 381]])).logits.square().sum().backward()
    assert all(each.grad is not None for each in adapted.parameters() if each.requires_grad)
    assert sum("trainable_tokens" in name for name, _ in adapted.named_parameters()) == len(expected)


def test_what_peft_cannot_train_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    from transformers import AutoConfig

    def empty(kind: str, **changes: Any) -> Any:
        return build_empty_model(AutoConfig.for_model(kind, num_hidden_layers=1, **changes), ModelSection())

    with pytest.raises(UserError, match=r"^model.added_tokens: the output head of PhiForCausalLM has a bias.*lm_head"):
        check_added_tokens(empty("phi"), LoraSection(), [5])
    check_added_tokens(empty("phi"), LoraSection(modules_to_save=("embed_tokens", "lm_head")), [5])
    with pytest.raises(UserError, match=r"^model.added_tokens: LlamaForCausalLM ties .* name both"):
        check_added_tokens(empty("llama", tie_word_embeddings=True), LoraSection(modules_to_save=("lm_head",)), [5])
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "trainable_token_indices": {"embed_tokens": [5, 6]}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    lora = LoraSection(adapter_path=str(tmp_path))
    check_added_tokens(empty("llama", tie_word_embeddings=True), lora, [5])
    for model, tokens in ((empty("llama", tie_word_embeddings=True), [5, 7]), (empty("llama"), [5])):
        with pytest.raises(UserError, match=r"^model.added_tokens: the adapter at lora.adapter_path=.* has no .* rows"):
            check_added_tokens(model, lora, tokens)


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["embed_tokens"]}])
def test_a_tied_model_is_merged_with_its_rows(lora: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ground = make_questions(tmp_path, tie_word_embeddings=True)
    train(ground, **(SETTINGS | {"training__max_steps": 4}), **{f"lora__{name}": value for name, value in lora.items()})
    run = find_run(tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(merge(run, tmp_path / "merged"))
    tokens = torch.tensor([[5, 9, 327, 31, 328, 7]])
    with torch.no_grad():
        expected = load_trained_model(run, load_saved_tokenizer(run), CPU)(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
