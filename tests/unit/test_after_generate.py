"""Answers: the model's own words through the chat template, ended where training ended them, base and adapter apart."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from tests.unit.test_after_run import make_run
from trainer.checkpoint.finished_run import find_run, load_trained, saved_tokenizer
from trainer.commands import chat, generate
from trainer.commands.generate import Sampling, answer, show
from trainer.config import UserError
from trainer.model.answers import answer_prompt, conversation_ids, prompt_ids, stop_tokens


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> tuple[Any, Any]:
    run = find_run(run_dir)
    tokenizer = saved_tokenizer(run)
    return load_trained(run, tokenizer, torch.device("cpu")), tokenizer


def by_hand(model: Any, tokenizer: Any, ids: torch.Tensor, count: int) -> str:
    """Greedy decoding without a cache: the likeliest token, over and over."""
    length = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < length + count:
            token = model(ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
            if token in stop_tokens(model, tokenizer):
                break
    return str(tokenizer.decode(ids[0, length:], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("prompt", ["seven green cats", "over under", "a"])
def test_a_greedy_answer_is_the_likeliest_token_over_and_over(trained: tuple[Any, Any], prompt: str) -> None:
    model, tokenizer = trained
    ids = prompt_ids(tokenizer, prompt, None)
    found = answer(model, tokenizer, prompt, Sampling(max_new_tokens=12))
    assert found == by_hand(model, tokenizer, ids, 12)
    with model.disable_adapter():
        base = by_hand(model, tokenizer, ids, 12)
    assert answer(model, tokenizer, prompt, Sampling(max_new_tokens=12), with_adapter=False) == base
    assert found != base


def test_a_prompt_ends_where_the_assistant_takes_over(trained: tuple[Any, Any]) -> None:
    _, tokenizer = trained
    text = tokenizer.decode(prompt_ids(tokenizer, "red cat", "be brief")[0])
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nred cat<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


def test_a_template_without_system_turns_says_so(run_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"chat template refuses the conversation .*no system turns here"):
        prompt_ids(tokenizer, "x", "be brief")


def test_an_answer_ends_with_the_turn_even_if_the_base_knows_another_end(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    tokenizer.eos_token = "<|endoftext|>"
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model.generation_config.eos_token_id = ends[0]
    try:
        assert stop_tokens(model, tokenizer) == sorted(ends)
    finally:
        model.generation_config.eos_token_id = ends[1]


def test_the_answer_never_runs_past_the_models_context(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    prompt = "cat " * 230
    room = 256 - prompt_ids(tokenizer, prompt, None).shape[1]
    assert 0 < room < 20
    longest = answer(model, tokenizer, prompt, Sampling(max_new_tokens=1000))
    assert longest == answer(model, tokenizer, prompt, Sampling(max_new_tokens=room))
    assert longest != answer(model, tokenizer, prompt, Sampling(max_new_tokens=room - 1)), "it did not end by itself"


def test_low_top_p_is_greedy_and_a_high_temperature_is_not(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    greedy = answer(model, tokenizer, "red cat", Sampling(12))
    assert answer(model, tokenizer, "red cat", Sampling(12, temperature=1.0, top_p=1e-6)) == greedy
    torch.manual_seed(0)
    drawn = {answer(model, tokenizer, "red cat", Sampling(12, temperature=5.0)) for _ in range(4)}
    assert len(drawn) > 1


def test_one_answer_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=20)
    show({"adapter": "[bold]a list[0] of words that is longer than the line[/bold]"}, console)
    assert console.file.getvalue() == "[bold]a list[0] of words that is longer than the line[/bold]\n"  # type: ignore[attr-defined]


def test_prompts_come_from_the_command_line_or_line_by_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--max-new-tokens", "6"]
    assert generate.main([str(run_dir), "seven cats", *few]) == 0
    single = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("seven cats\n\n  blue dog \n"))
    assert generate.main([str(run_dir), *few]) == 0
    piped = capsys.readouterr().out
    assert piped.startswith(single) and len(piped) > len(single)
    assert generate.main([str(run_dir), "seven cats", "--base", *few]) == 0
    beside = capsys.readouterr().out
    assert "base" in beside and "base + adapter" in beside


def test_bytes_that_are_no_text_are_answered_with_a_note(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf\n\ncaf\xe9\n \nseven cats\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", given)
    assert generate.main([str(run_dir), "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("note: ") == 1 and "'caf\ufffd' is not UTF-8 text" in captured.err
    assert captured.out.count("\n") == 2
    assert generate.main([str(run_dir), "caf\udce9", "--max-new-tokens", "2"]) == 0
    assert "'caf\ufffd' is not UTF-8 text" in capsys.readouterr().err


def test_sample_prompts_are_asked_as_generate_asks(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained

    class OfOneModel:
        device, module = torch.device("cpu"), model

        @staticmethod
        def zero_optimization_stage() -> int:
            return 0

    asked = answer(model, tokenizer, "seven cats", Sampling(12), system="be brief")
    engine: Any = OfOneModel()
    assert answer_prompt(engine, tokenizer, "seven cats", 12, "be brief").strip() == asked
    assert asked != answer(model, tokenizer, "seven cats", Sampling(12))


def test_prompts_answered_together_are_answered_as_alone(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    prompts, sampling = ["a", "seven green cats went over", "over under"], Sampling(max_new_tokens=8)
    rows = [prompt_ids(tokenizer, prompt, None) for prompt in prompts]
    alone = [answer(model, tokenizer, prompt, sampling) for prompt in prompts]
    assert generate.continued(model, tokenizer, rows, sampling) == alone and len(set(alone)) > 1


def test_a_merged_adapter_answers_as_an_adapter_beside_the_base(run_dir: Path, trained: tuple[Any, Any]) -> None:
    tokenizer = trained[1]
    merged = generate.load_to_answer(find_run(run_dir), tokenizer, both=False)
    ids = prompt_ids(tokenizer, "seven green cats", None)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trained[0](ids).logits, atol=1e-4, rtol=1e-4)


def test_prompts_come_from_a_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("seven green cats\n\nover under\n")
    records.write_text('{"prompt": "seven green cats"}\n{"prompt": "over under"}\n')
    shown = []
    for file in (text, records):
        words = [str(run_dir), "--prompts", str(file), "--batch-size", "2", "--max-new-tokens", "6"]
        assert generate.main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "> over under\n" in shown[0]
    records.write_text('{"question": "?"}\n')
    assert generate.main([str(run_dir), "--prompts", str(records)]) == 2
    assert "record 1 is no" in capsys.readouterr().err


def test_a_chat_remembers_until_it_begins_anew(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[dict[str, str]]] = []
    real = conversation_ids
    monkeypatch.setattr(chat, "conversation_ids", lambda t, turns: (seen.append(list(turns)), real(t, turns))[1])
    monkeypatch.setattr("sys.stdin", io.StringIO("red cat\nover under\n/new\nseven\n"))
    assert chat.main([str(run_dir), "--temperature", "0", "--max-new-tokens", "4"]) == 0
    roles = [[turn["role"] for turn in turns if turn["role"] != "system"] for turns in seen]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    assert capsys.readouterr().out.strip()
    assert chat.main([str(run_dir), "--top-p", "2"]) == 2
