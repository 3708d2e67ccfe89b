"""`zerolora init`: a file that is valid, says what its settings mean, and is never written over another."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.presets import PRESETS, find_nearest_preset, render_preset
from trainer.config import RunConfig, UserError, load_config

ROOT = Path(__file__).parents[2]


def init(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "launcher.cli", "init", *arguments]
    return subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_file_in_configs_with_comments(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(render_preset(name, path))
    loaded = load_config(path)
    preset = load_config(ROOT / "configs" / f"{PRESETS[name]}.yaml").config
    assert loaded.config == preset.model_copy(update={"output_dir": "runs/mine"})
    assert path.read_text().splitlines()[0] == f"# zerolora train {path}"


def test_every_setting_has_its_meaning_above_it_or_beside_it() -> None:
    lines = render_preset("llama2-7b", Path("mine.yaml")).splitlines()
    settings = [index for index, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    for index in settings:
        assert "#" in lines[index] or lines[index - 1].lstrip().startswith("# "), lines[index]
    at = lines.index("  r: 32")
    assert lines[at - 1] == f"  # {RunConfig.model_fields['lora'].annotation.model_fields['r'].description}"  # type: ignore[union-attr]
    assert max(map(len, lines)) <= 120


def test_init_writes_to_the_output_option(tmp_path: Path) -> None:
    result = init("--preset", "smollm2", "--output", "new/a.yaml", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert "zerolora validate new/a.yaml" in result.stdout
    assert yaml.safe_load((tmp_path / "new" / "a.yaml").read_text())["base_model"].endswith("SmolLM2-135M-Instruct")
    assert init("--preset", "granite-4.0-h-1b", cwd=tmp_path).returncode == 0
    assert (tmp_path / "granite-4.0-h-1b.yaml").is_file()


def test_init_fills_in_model_and_data(tmp_path: Path) -> None:
    result = init(
        "--model", "./my models/Qwen2.5-3B", "--data", "my data #1.jsonl", "--output", "my run.yaml", cwd=tmp_path
    )
    assert result.returncode == 0 and result.stderr == ""
    first, *commands = result.stdout.splitlines()
    assert "./my models/Qwen2.5-3B does not exist; correct base_model" in first
    (tmp_path / "my models" / "Qwen2.5-3B").mkdir(parents=True)
    (tmp_path / "my models" / "Qwen2.5-3B" / "config.json").touch()
    there = init("--model", "./my models/Qwen2.5-3B", "--data", "my data #1.jsonl", "--output", "b.yaml", cwd=tmp_path)
    assert "my data #1.jsonl does not exist yet" in there.stdout
    assert "nope does not exist yet" in init("--data", "nope", "--output", "c.yaml", cwd=tmp_path).stdout
    assert "exist" not in init("--data", "owner/name", "--output", "d.yaml", cwd=tmp_path).stdout
    assert commands == [f"  zerolora {name} 'my run.yaml'" for name in ("validate", "inspect", "train")]
    loaded = load_config(tmp_path / "my run.yaml")
    assert loaded.notes == ()
    assert loaded.config.base_model == "./my models/Qwen2.5-3B" and loaded.config.output_dir == "runs/my-run"
    assert loaded.config.dataset.path == "my data #1.jsonl"
    text = (tmp_path / "my run.yaml").read_text()
    assert text.startswith("# zerolora train 'my run.yaml'\n") and "Gated" not in text
    assert init("--data", "d.jsonl", cwd=tmp_path).returncode == 0
    config = load_config(tmp_path / "smollm2.yaml").config
    assert config.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct", "open, and small enough for a laptop"
    assert init("--model", "x" * 300, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("HuggingFaceTB/SmolLM2-360M", "smollm2"),
        ("models/Mistral-7B-v0.3/", "mistral-7b"),
        ("Qwen/Qwen3-4B", "tinyllama"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl"),
        ("black-forest-labs/FLUX.1-dev", "flux-dev"),
        ("black-forest-labs/FLUX.2-klein-base-4B", "flux2-klein"),
    ],
)
def test_the_preset_nearest_to_a_model(model: str, preset: str) -> None:
    assert find_nearest_preset(model) == preset


def test_the_title_stands_apart_from_the_first_setting() -> None:
    lines = render_preset("smollm2", Path("a.yaml")).splitlines()
    first = lines.index("base_model: HuggingFaceTB/SmolLM2-135M-Instruct")
    assert lines[first - 2] == "" and lines[first - 3].startswith("# SmolLM2 135M")


def test_a_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# zerolora train a.yaml")
    refused = init("--preset", "smollm2", "--output", "a.yaml", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == "error: --output a.yaml: already exists; use another file, or add --force\n"
    assert (tmp_path / "a.yaml").read_text() == "# zerolora train a.yaml"
    assert init("--preset", "smollm2", "--output", "a.yaml", "--force", cwd=tmp_path).returncode == 0
    assert load_config(tmp_path / "a.yaml").config.output_dir == "runs/a"


def test_the_data_is_not_replaced_even_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    refused = init("--model", "m", "--data", "a.jsonl", "--output", "./a.jsonl", "--force", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr == (
        "error: --output a.jsonl: was not written by zerolora; use another file, or remove this one\n"
    )
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "a"}'


@pytest.mark.parametrize(
    ("name", "hint"), [("llama2_7b", "did you mean llama2-7b?"), ("bert", "use one of llama2-7b, llama3.1-8b")]
)
def test_an_unknown_preset_is_one_line(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"--preset {name}: no such preset; .*{hint.replace('?', '.')}"):
        render_preset(name, Path("a.yaml"))


def test_a_folder_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = init("--preset", "smollm2", "--output", "file/a.yaml", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "cannot be written" in result.stderr
