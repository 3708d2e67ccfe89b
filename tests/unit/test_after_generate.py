"""Answers: the model's own words through the chat template, ended where training ended them, base and adapter apart."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from tests.tiny import record_base
from tests.unit.test_after_run import make_run
from tests.unit.test_data_chat import THINKING
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands import chat, generate
from trainer.commands.generate import AnswerStreamer, Sampling, generate_answers, print_answers
from trainer.config import DatasetSection, UserError
from trainer.data.prompt_files import format_prompt, read_prompts, read_sample_prompts
from trainer.data.records import PLAIN_TEXT
from trainer.model.answers import GREEDY, encode_prompt, find_stop_tokens, generate_greedy_answers, generate_texts

PLAIN = DatasetSection(path="x")
BRIEF = DatasetSection(path="x", system_prompt="be brief")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> tuple[Any, Any]:
    run = find_run(run_dir)
    tokenizer = load_saved_tokenizer(run)
    return load_trained_model(run, tokenizer, torch.device("cpu")), tokenizer


def answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    *,
    section: DatasetSection = PLAIN,
    adapter: bool = True,
) -> str:
    """The answer to a user message."""
    rows = [encode_prompt(tokenizer, section, prompt, None)]
    return generate_answers(model, tokenizer, rows, sampling, with_adapter=adapter)[0]


def by_hand(model: Any, tokenizer: Any, ids: torch.Tensor, count: int) -> str:
    """Greedy decoding without a cache: the likeliest token, over and over."""
    length = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < length + count:
            token = model(ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
            if token in find_stop_tokens(model, tokenizer):
                break
    return str(tokenizer.decode(ids[0, length:], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("prompt", ["seven green cats", "over under", "a"])
def test_a_greedy_answer_is_the_likeliest_token_over_and_over(trained: tuple[Any, Any], prompt: str) -> None:
    model, tokenizer = trained
    ids = encode_prompt(tokenizer, PLAIN, prompt, None)
    found = answer(model, tokenizer, prompt, Sampling(max_new_tokens=12))
    assert found == by_hand(model, tokenizer, ids, 12)
    with model.disable_adapter():
        base = by_hand(model, tokenizer, ids, 12)
    assert answer(model, tokenizer, prompt, Sampling(max_new_tokens=12), adapter=False) == base
    assert found != base


def test_prompts_of_a_file_keep_their_tools(trained: tuple[Any, Any], tmp_path: Path) -> None:
    _, tokenizer = trained
    tools = [{"type": "function", "function": {"name": "weather"}}]
    record = {
        "messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}],
        "tools": tools,
    }
    (tmp_path / "asked.jsonl").write_text(json.dumps(record) + "\n")
    [prompt] = read_prompts(str(tmp_path / "asked.jsonl"), "--prompts")
    assert format_prompt(prompt) == "Rain?" and generate.replace_invalid_unicode(prompt) == prompt
    section = DatasetSection(path="unused", chat_template=THINKING)
    text = tokenizer.decode(encode_prompt(tokenizer, section, prompt, None)[0])
    assert text.startswith(f"<|im_start|>system\nTools:\n{json.dumps(tools[0])}<|im_end|>\n") and "No." not in text
    with pytest.raises(UserError, match="the conversation has tools, which the chat template does not support"):
        encode_prompt(tokenizer, PLAIN, prompt, None)
    for extra in ({"tools": tools}, {"system": "Be brief."}):
        (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "Rain?"} | extra) + "\n")
        with pytest.raises(UserError, match=rf"record 1: has {next(iter(extra))}, which only conversations can have; "):
            list(read_prompts(str(tmp_path / "asked.jsonl"), "--prompts"))


def test_a_prompt_ends_where_the_assistant_takes_over(trained: tuple[Any, Any]) -> None:
    _, tokenizer = trained
    text = tokenizer.decode(encode_prompt(tokenizer, BRIEF, "red cat", None)[0])
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nred cat<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


def test_a_template_without_system_turns_says_so(run_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"chat template rejects the conversation .*no system turns here"):
        encode_prompt(tokenizer, BRIEF, "x", None)


def test_an_answer_ends_with_the_turn_even_if_the_base_knows_another_end(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    tokenizer.eos_token = "<|endoftext|>"
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model.generation_config.eos_token_id = ends[0]
    try:
        assert find_stop_tokens(model, tokenizer) == sorted(ends)
    finally:
        model.generation_config.eos_token_id = ends[1]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("num_return_sequences", 3, r"Greedy methods .* \(got 3\)"),
        ("return_dict_in_generate", True, ""),
        ("stop_strings", ["cat"], ""),
        ("bad_words_ids", [[99_999]], r"^base_model=.*model: generation_config.json: .*\[99999\]; fix this key"),
        ("force_words_ids", [[1]], r"generation_config.json: Constrained Beam Search requires"),
    ],
)
def test_keys_of_the_models_generation_config(key: str, value: object, line: str, trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    before = getattr(model.generation_config, key, None)
    setattr(model.generation_config, key, value)
    try:
        with pytest.raises(UserError, match=line) if line else contextlib.nullcontext():
            assert len(generate_texts(model, tokenizer, [[5, 6], [7, 8]], model.device, 2, **GREEDY)) == 2
    finally:
        setattr(model.generation_config, key, before)


def test_the_answer_never_runs_past_the_models_context(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    prompt = "cat " * 230
    room = 256 - encode_prompt(tokenizer, PLAIN, prompt, None).shape[1]
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
    print_answers({"adapter": "[bold]a list[0] of words that is longer than the line[/bold]"}, console)
    assert console.file.getvalue() == "[bold]a list[0] of words that is longer than the line[/bold]\n"  # type: ignore[attr-defined]


def test_a_terminal_gets_no_escape_sequences_of_prompts_and_answers(trained: tuple[Any, Any]) -> None:
    text, console = "red\x1b]0;title\x07 cat\x9b2J", Console(file=io.StringIO(), force_terminal=True)
    print_answers({"adapter": text}, console)
    print_answers({"base": text, "adapter": text}, console)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.count("red cat") == 3 and "title" not in written and "\x9b" not in written
    streamer = AnswerStreamer(trained[1])
    with contextlib.redirect_stdout(io.StringIO()) as streamed:
        streamer.on_finalized_text(text, stream_end=True)
    assert streamed.getvalue() == "red cat\n"
    plain = Console(file=io.StringIO())
    print_answers({"adapter": text}, plain)
    assert plain.file.getvalue() == text + "\n"  # type: ignore[attr-defined]


def test_prompts_come_from_the_command_line_or_line_by_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--max-new-tokens", "6"]
    assert generate.main([str(run_dir), "seven cats", *few]) == 0
    single = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert generate.main([str(run_dir), *few]) == 2
    assert "error: standard input: has no prompt; pipe one per line, or pass PROMPT to" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("seven cats\n\n  blue dog \n"))
    assert generate.main([str(run_dir), *few]) == 0
    piped = capsys.readouterr().out
    assert piped.startswith(single) and len(piped) > len(single)
    assert generate.main([str(run_dir), "seven cats", "--base", *few]) == 0
    shown = capsys.readouterr().out
    assert "base" in shown and "base + adapter" in shown


def test_bytes_that_are_no_text_are_answered_with_a_note(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf\n\ncaf\xe9\n \nseven cats\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", given)
    assert generate.main([str(run_dir), "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("note: ") == 1 and "'caf\ufffd' is not valid Unicode" in captured.err
    assert captured.out.count("\n") == 2
    assert generate.main([str(run_dir), "caf\udce9", "--max-new-tokens", "2"]) == 0
    assert "'caf\ufffd' is not valid Unicode" in capsys.readouterr().err


def test_sample_prompts_are_asked_as_generate_asks(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained

    class OfOneModel:
        device, module = torch.device("cpu"), model

        @staticmethod
        def zero_optimization_stage() -> int:
            return 0

    asked = answer(model, tokenizer, "seven cats", Sampling(12), section=BRIEF)
    engine: Any = OfOneModel()
    ids = encode_prompt(tokenizer, BRIEF, "seven cats", None).tolist()
    assert generate_greedy_answers(engine, tokenizer, ids, 12)[0].strip() == asked
    assert asked != answer(model, tokenizer, "seven cats", Sampling(12))


def test_prompts_answered_together_are_answered_as_alone(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    prompts, sampling = ["a", "seven green cats went over", "over under"], Sampling(max_new_tokens=8)
    rows = [encode_prompt(tokenizer, PLAIN, prompt, None) for prompt in prompts]
    alone = [answer(model, tokenizer, prompt, sampling) for prompt in prompts]
    assert generate.generate_answers(model, tokenizer, rows, sampling) == alone and len(set(alone)) > 1


def test_a_merged_adapter_answers_as_an_unmerged_one(run_dir: Path, trained: tuple[Any, Any]) -> None:
    tokenizer = trained[1]
    merged = generate.load_for_inference(find_run(run_dir), tokenizer, with_base=False)
    ids = encode_prompt(tokenizer, PLAIN, "seven green cats", None)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trained[0](ids).logits, atol=1e-4, rtol=1e-4)


PROMPTS = {
    "prompts.txt": "seven green cats\n\nover under\n",
    "prompts.jsonl": '{"prompt": "seven green cats"}\n{"prompt": "over under", "completion": "left out"}\n',
    "prompts.json": '[{"question": "seven green cats"}, {"instruction": "over under"}]',
    "prompts.csv": "id,prompt\n1,seven green cats\n2,over under\n",
    "turns.jsonl": '{"messages": [{"role": "user", "content": "seven green cats"}]}\n'
    '{"prompt": [{"from": "human", "value": "over under"}, {"from": "gpt", "value": "left out"}]}\n',
}


def test_prompts_come_from_files_of_every_kind(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for name, content in PROMPTS.items():
        (tmp_path / name).write_text(content)
        words = [str(run_dir), "--prompts", str(tmp_path / name), "--batch-size", "2", "--max-new-tokens", "6"]
        assert generate.main(words) == 0
        shown.append(capsys.readouterr().out)
    assert "> over under\n" in shown[0] and set(shown) == {shown[0]}


@pytest.mark.parametrize(
    ("record", "needle"),
    [
        ('{"label": "?"}', "record 1: has no prompt (the record has label)"),
        ('{"prompt": null}', "record 1: has no prompt (the record has no fields)"),
        ('{"prompt": 5}', "record 1: prompt is a number; it must be a string or a list of turns"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no question to answer"),
        ('{"messages": [5]}', "turn 1: is a number"),
        ("{broken", "line 1 of p.jsonl is not JSON"),
    ],
)
def test_a_file_without_a_prompt_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str, needle: str
) -> None:
    (tmp_path / "p.jsonl").write_text(record + "\n")
    assert generate.main([str(run_dir), "--prompts", str(tmp_path / "p.jsonl")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --prompts=") and needle in captured.err and captured.err.count("\n") == 1


def test_a_missing_file_of_sample_prompts_is_reported(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("red cat\n")
    texts = ["Summarize notes.md", str(tmp_path / "p.txt")]
    assert list(read_sample_prompts(texts)) == ["Summarize notes.md", "red cat"]
    with pytest.raises(UserError, match=r"^logging\.sample_prompts=nope\.jsonl: no such file or folder"):
        list(read_sample_prompts(["nope.jsonl"]))


def test_odd_prompts_are_answered_and_one_that_is_too_long_alone_is_not(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["a\u2028b", "half \ud83d", "cat " * 300, "over under"]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": texts[0]}, ensure_ascii=False) + "\n", encoding="utf-8")
    with file.open("a") as more:
        more.writelines(json.dumps({"prompt": text}) + "\n" for text in texts[1:])
    assert generate.main([str(run_dir), "--prompts", str(file), "--batch-size", "2", "--max-new-tokens", "2"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("> ") == 3 and "> over under\n" in captured.out
    assert "context holds 256" in captured.err and "error: 1 prompt was not answered" in captured.err
    assert f"error: --prompts={file}, record 3: 'cat cat" in captured.err
    file.write_text("\n" + json.dumps({"prompt": "cat " * 300}) + "\n")
    assert generate.main([str(run_dir), "--prompts", str(file)]) == 2
    assert f"error: --prompts={file}, record 1: the prompt has" in capsys.readouterr().err


FORMS = {
    "pairs": ("{system}{prompt}", "be brief\n\nred cat"),
    "alpaca": ("{system}### Instruction:\n{prompt}\n\n### Response:\n", None),
    "plain text": (PLAIN_TEXT, "red cat"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_is_asked_in_the_form_that_was_trained(trained: tuple[Any, Any], name: str) -> None:
    _, tokenizer = trained
    text, expected = FORMS[name]
    expected = expected or "be brief\n\n### Instruction:\nred cat\n\n### Response:\n"
    assert tokenizer.decode(encode_prompt(tokenizer, BRIEF, "red cat", text)[0]) == expected


@pytest.mark.parametrize(("options", "template"), [([], False), (["--raw"], False), (["--chat"], True)])
def test_generate_and_chat_use_the_form_of_the_run(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    template: bool,
) -> None:
    copied = shutil.copytree(run_dir, tmp_path / "run")
    record_base(copied, find_run(run_dir).config, prompt_text="Q: {prompt}\nA:")
    seen: list[str] = []
    for module in (generate, chat):
        monkeypatch.setattr(module, "generate_answers", lambda model, tokenizer, rows, *_, **__: (
            seen.extend(tokenizer.decode(row[0]) for row in rows), [""])[1])  # fmt: skip
    assert generate.main([str(copied), "red cat", *options]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("red cat\nover\n"))
    assert chat.main([str(copied), *options]) == 0
    first, second, third = seen
    assert first == second and ("<|im_start|>" in first) == template
    assert template or first == ("red cat" if options else "Q: red cat\nA:")
    assert ("red cat" in third) == template, "what is no conversation has no earlier turns"
    assert ("answered independently" in capsys.readouterr().err) != template


def test_a_chat_remembers_until_it_begins_anew(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[dict[str, str]]] = []
    monkeypatch.setattr(chat, "encode_prompt", lambda t, s, it, *x: (seen.append(it), encode_prompt(t, s, it, *x))[1])
    monkeypatch.setattr("sys.stdin", io.StringIO("red cat\nover\n/help\n/quit\n/new\nseven\n"))
    assert chat.main([str(run_dir), "--temperature", "0", "--max-new-tokens", "4"]) == 0
    assert [[turn["role"] for turn in turns] for turns in seen] == [["user"], ["user", "assistant", "user"], ["user"]]
    captured = capsys.readouterr()
    assert captured.out.strip() and "/new" in captured.err
    assert chat.main([str(run_dir), "--top-p", "2"]) == 2


def test_a_chat_longer_than_the_context_continues(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(chat, "generate_answers", lambda model, tokenizer, rows, *_, **__: (
        seen.append(tokenizer.decode(rows[0][0])), ["yes"])[1])  # fmt: skip
    lines = ["first " + "cat " * 120, "second " + "dog " * 120, "cat " * 300, "third"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert chat.main([str(run_dir), "--max-new-tokens", "8"]) == 0
    err = capsys.readouterr().err
    assert len(seen) == 3 and "first" in seen[0] and "first" not in seen[1] and "second" in seen[2]
    assert "no longer fit" in err and "shorten it" in err


def test_a_system_prompt_is_refused_where_prompts_are_continued_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["run", "hello", "--top-p", "0.5"]) == 2
    assert capsys.readouterr().err.startswith("error: --top-p=0.5: has no effect at --temperature 0; remove one")
    assert generate.main(["run", "hello", "--raw", "--system", "be brief"]) == 2
    assert capsys.readouterr().err.startswith("error: --system: has no effect with --raw, ")
