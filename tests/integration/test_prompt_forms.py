"""A run on pairs of texts: sample prompts, `generate` and `eval` write prompts as training did."""

import json
from pathlib import Path

import pytest

from tests.runs_in_process import make_ground, train_alone
from trainer.commands import generate


def test_a_run_on_pairs_asks_without_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ground = make_ground(tmp_path)
    rows = [json.loads(line)["messages"] for line in (ground / "train.jsonl").read_text().splitlines()]
    pairs = "".join(f"{question['content']},{answer['content']}\n" for question, answer in rows)
    (ground / "faq.csv").write_text("question,answer\n" + pairs)
    (ground / "ask.jsonl").write_text(
        '{"prompt": "red cat"}\n{"messages": [{"role": "user", "content": "blue dog"}]}\n'
    )
    seen = train_alone(
        ground,
        dataset__path=str(ground / "faq.csv"),
        dataset__system_prompt="Reverse it.",
        logging__sample_prompts=[str(ground / "ask.jsonl")],
        logging__sample_tokens=8,
    )
    assert "prompts are used as plain text, without the tokenizer's chat template" in seen
    run = ground / "run"
    assert json.loads((run / "run.json").read_text())["prompt_text"] == "{system}{prompt}"
    answers = json.loads((run / "answers.json").read_text())
    assert list(answers) == ["red cat", "blue dog"]
    outputs = {}
    for options in ([], ["--raw"], ["--chat"]):
        assert generate.main([str(run), "red cat", "--max-new-tokens", "8", *options]) == 0
        outputs[" ".join(options)] = capsys.readouterr().out.strip()
    assert outputs[""] == answers["red cat"]["after"] and len(set(outputs.values())) == 3
