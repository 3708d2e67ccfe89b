"""A run's folder found again: what is read from it, and one line for every folder that is not one. Makes runs, too."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench import __main__ as bench
from tests.tiny import make_model, record_base, write_chats
from trainer.checkpoint.adapter_files import record_result
from trainer.checkpoint.checkpoint_files import seal
from trainer.checkpoint.finished_run import ADAPTER_FILES, find_run, load_saved_tokenizer, load_trained_model
from trainer.commands import evaluate, generate, merge, push
from trainer.commands.export import __main__ as export
from trainer.config import RunConfig, UserError
from trainer.config.files import read_json
from trainer.model.base import load_tokenizer
from trainer.monitor.report import __main__ as report


def make_run(folder: Path, *, llama: dict[str, Any] | None = None, base: Path | None = None, **settings: Any) -> Path:
    """A run as training leaves it, without the training: the adapter's B is drawn and not learned."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base_model = base or make_model(folder / "model", **(llama or {}))
    write_chats(folder / "held.jsonl", 9, seed=1)
    dataset = {"path": str(folder / "gone.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")}
    dataset["evaluation"] = {"path": str(folder / "held.jsonl")}
    run_dir = folder / "run"
    values: dict[str, Any] = {"base_model": str(base_model), "output_dir": str(run_dir), "dataset": dataset}
    values["training"] = {"precision": "fp32"}
    config = RunConfig.model_validate(values | settings)
    run_dir.mkdir()
    (run_dir / "training_config.json").write_text(config.model_dump_json())
    record_base(run_dir, config)
    torch.manual_seed(1)
    names = list(config.lora.target_modules)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear" if names == ["all-linear"] else names)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model), lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # what starts at zero
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(run_dir)
    load_tokenizer(str(base_model), config.model).save_pretrained(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_a_checkpoint_is_a_run_with_the_configuration_of_its_parent(run_dir: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (tmp_path / "training_config.json").write_text((run_dir / "training_config.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({"run": read_json(run_dir / "run.json")["identity"]}))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (checkpoint / name).write_bytes((run_dir / name).read_bytes())
    with pytest.raises(UserError, match=r"checkpoint-3: COMPLETE is missing or damaged, .*; use another checkpoint"):
        find_run(checkpoint)
    seal(checkpoint)
    run = find_run(checkpoint)
    assert (run.folder, run.run_dir) == (checkpoint, tmp_path)
    assert run.config == find_run(run_dir).config


def test_relative_paths_are_of_the_folder_that_the_run_was_started_in(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run of `base_model: model` in run_dir's parent records, looked at from elsewhere."""
    data = {"mix": ({"path": "held.jsonl"}, {"path": "owner/data"}), "evaluation": {"path": "held.jsonl"}}
    relative = {"base_model": "model", "output_dir": "run", "dataset": data, "training": {"precision": "fp32"}}
    config = RunConfig.model_validate(relative)
    monkeypatch.chdir(run_dir.parent)
    recorded = shutil.copytree(run_dir, tmp_path / "run")
    record_base(recorded, config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = find_run(Path("../run"))
    assert run.config.base_model == str(run_dir.parent / "model")
    assert [source.path for source in run.config.dataset.mix] == [str(run_dir.parent / "held.jsonl"), "owner/data"]
    assert run.config.dataset.evaluation.path == str(run_dir.parent / "held.jsonl")  # type: ignore[union-attr]
    assert merge.main(["../run", "--output", "merged"]) == 0 and Path("merged/model.safetensors").is_file()
    assert find_run(Path("../run"), "named", allow_mismatch=True).config.base_model == "named"


def test_the_tokenizer_has_the_chat_template_of_the_run(tmp_path: Path) -> None:
    template = "{% for message in messages %}({{ message['content'] }}){% endfor %}"
    folder = make_run(tmp_path)
    run = find_run(folder)
    tokenizer = load_saved_tokenizer(run)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    other = tmp_path / "other.jinja"  # the file has changed since
    other.write_text(template.replace("(", "["))
    data = run.config.dataset.model_copy(update={"chat_template": str(other)})
    config = run.config.model_copy(update={"dataset": data})
    (folder / "training_config.json").write_text(config.model_dump_json())
    assert load_saved_tokenizer(find_run(folder, allow_mismatch=True)).chat_template == template


def test_another_base_model_takes_the_place_of_the_runs(run_dir: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=7)
    device = torch.device("cpu")
    tokens = torch.arange(3, 20)[None]
    logits = []
    for base_model in (None, str(other)):
        run = find_run(run_dir, base_model, allow_mismatch=True)
        with torch.no_grad():
            logits.append(load_trained_model(run, load_saved_tokenizer(run), device)(tokens).logits)
    assert not torch.allclose(logits[0], logits[1], atol=0.1)


def test_an_adapter_that_does_not_fit_the_base_is_an_error_of_one_line(run_dir: Path, tmp_path: Path) -> None:
    run = find_run(run_dir, str(make_model(tmp_path / "wide", hidden=128)), allow_mismatch=True)
    with pytest.raises(UserError, match=r"does not match base_model=.* has shape .*; use the base"):
        load_trained_model(run, load_saved_tokenizer(run), torch.device("cpu"))


def _broken(run_dir: Path, folder: Path, case: str) -> Path:
    """A folder that is wrong in the way that `case` names."""
    config = find_run(run_dir).config
    changes: dict[str, Any] = {}
    if case == "full":
        changes["adapter"] = "none"
    elif case == "no data":
        changes["dataset"] = config.dataset.model_copy(update={"evaluation": None})
    elif case == "base gone":
        changes["base_model"] = str(folder / "gone")
    folder.mkdir()
    for path in run_dir.iterdir():
        if path.is_file() and not (case == "no adapter" and path.name.startswith("adapter_")):
            (folder / path.name).write_bytes(path.read_bytes())
    text = config.model_copy(update=changes).model_dump_json()
    (folder / "training_config.json").write_text("{}" if case == "broken config" else text)
    adapter = folder / "adapter_model.safetensors"
    if case == "cut adapter":
        adapter.write_bytes(adapter.read_bytes()[:-11])
    elif case == "pickled adapter":
        torch.save({"w": torch.ones(3)}, adapter)
    elif case == "changed adapter":
        record_result(folder, ADAPTER_FILES, read_json(folder / "run.json")["identity"])
        content = bytearray(adapter.read_bytes())
        content[-1] ^= 1
        adapter.write_bytes(content)
        (folder / "checkpoint-3").mkdir()
        (folder / "checkpoint-3" / "COMPLETE").touch()
    elif case == "changed settings":
        record_result(folder, ADAPTER_FILES, read_json(folder / "run.json")["identity"])
        settings = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1}))
    if case == "latin-1":
        (folder / "training_config.json").write_bytes(text.replace("output_dir", "caf\xe9").encode("latin-1"))
    if case == "not a run":
        (folder / "training_config.json").unlink()
    if case == "occupied":
        (folder / "merged").mkdir()
        (folder / "merged" / "model.safetensors").write_text("mine")
    return folder


ALL = (evaluate, generate, merge, push)
BAD_FOLDERS = [
    *[(module, "not a run", "is not a run's output folder") for module in ALL],
    *[(module, "no adapter", "adapter_model.safetensors is missing.*train it first") for module in ALL],
    *[(module, "full", "adapter: none.*full model") for module in ALL],
    *[(module, "broken config", "training_config.json: base_model: is missing") for module in ALL],
    (evaluate, "latin-1", "training_config.json: line 1: byte 0xe9 is not UTF-8"),
    (evaluate, "base gone", "base_model=.*gone: does not exist; pass its new location with --base-model"),
    (generate, "base gone", "base_model=.*gone: does not exist; pass its new location with --base-model"),
    (merge, "base gone", "base_model=.*gone: does not exist; pass its new location with --base-model"),
    *[(module, "cut adapter", "adapter_model.safetensors is truncated") for module in ALL],
    *[(module, "pickled adapter", "adapter_model.safetensors is not a safetensors file") for module in ALL],
    *[
        (module, "changed adapter", "adapter_model.safetensors is damaged: .*its newest checkpoint is")
        for module in ALL
    ],
    *[
        (module, "changed settings", "adapter_config.json was changed after training.*--allow-mismatch")
        for module in ALL
    ],
    (evaluate, "no data", "has no held-out data; pass"),
    (merge, "occupied", "merged: already exists"),
]


@pytest.mark.parametrize(("module", "case", "message"), BAD_FOLDERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_folder_is_one_line_and_exit_code_2(
    module: Any, case: str, message: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _broken(run_dir, tmp_path / "broken", case)
    before = sorted(folder.rglob("*"))
    arguments = [str(folder), *(["me/tiny", "--dry-run"] if module is push else ())]
    arguments += ["hello"] if module is generate else []
    _is_one_line(module.main(arguments), capsys, message)
    assert sorted(folder.rglob("*")) == before, "nothing is written"


BAD_ARGUMENTS = [
    (evaluate, ["RUN", "--split", "test"], "--split=test: needs --data"),
    (evaluate, ["RUN", "--json", "TMP/none/x.json"], "--json=.*folder does not exist"),
    (evaluate, ["RUN", "--json", "TMP"], "--json=.*: is a folder; use a file in it"),
    (
        evaluate,
        ["RUN", "--json", "TMP/file"],
        "file: already exists with other content; use another file, or remove this one",
    ),
    (bench, ["--json", "TMP"], "--json=.*: is a folder; use a file in it"),
    (bench, ["--json", "TMP/file"], "file: already exists with other content; use another file, or remove this one"),
    (evaluate, ["RUN", "--json", "TMP/" + "x" * 300], "--json=.*: File name too long"),
    (export, ["RUN", "--format", "gguf", "--output", "TMP/empty"], "empty: is a folder, but --format gguf"),
    (export, ["RUN", "--format", "hf", "--output", "TMP/dangling"], "dangling: already exists"),
    (merge, ["RUN", "--output", "TMP/dangling"], "dangling: already exists"),
    (merge, ["RUN", "--output", "TMP/" + "x" * 300], "File name too long"),
    (push, ["FOLDER_CARD", "me/tiny", "--dry-run"], "README.md: is a folder"),
    (report, ["FOLDER_CARD"], "report.html: is a folder"),
    (evaluate, ["RUN", "--data", "TMP/none.jsonl"], "none.jsonl"),
    (generate, ["RUN", "x", "--temperature", "-1"], "--temperature=-1: must be a finite number, 0 or more"),
    (generate, ["RUN", "x", "--temperature", "inf"], "--temperature=inf: must be a finite number, 0 or more"),
    (generate, ["RUN", "x", "--top-p", "0"], "--top-p=0: must be above 0"),
    (generate, ["RUN", "cat " * 300], "the prompt has [0-9]+ tokens, but the context holds 256"),
    (generate, ["RUN", ""], "PROMPT: empty"),
    (generate, ["RUN", "first", "  "], "PROMPT: empty"),
    (generate, ["TMP/none", "x"], "no such folder"),
    (export, ["RUN", "--format", "peft", "--output", "/proc/adapter"], "/proc/adapter: cannot be written"),
    (merge, ["RUN", "--output", "TMP/file"], "already exists"),
    (merge, ["RUN", "--output", "TMP/file/below"], "cannot be created in"),
    (push, ["RUN", "not a name"], "not a valid name"),
    (push, ["RUN", "a/b/c"], "not a valid name"),
    (generate, ["RUN", "x", "--base-model", "./none"], "--base-model=./none: does not exist; pass its new location"),
    (merge, ["RUN", "--base-model", "./none"], "--base-model=./none: does not exist; pass its new location"),
    (generate, ["RUN", "x", "lora.r=8"], "lora.r=8: settings cannot be changed here; remove it"),
    (push, ["RUN", "tiny"], "REPO=tiny: not a valid name; use owner/name"),
    (push, ["RUN", "me/tiny", "--base-model", "nope"], "--base-model=nope: is neither a folder nor a Hub ID; pass"),
    (push, ["RUN", "me/tiny"], "not logged in to the Hub; run `hf auth login`"),
]


@pytest.mark.parametrize(("module", "arguments", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[-40:])
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    module: Any,
    arguments: list[str],
    message: str,
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "get_token", lambda: None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    if "FOLDER_CARD" in arguments:
        shutil.copytree(run_dir, tmp_path / "odd", ignore=shutil.ignore_patterns("README.md"))
        (tmp_path / "odd" / "README.md").mkdir()
        (tmp_path / "odd" / "report.html").mkdir()
        (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    places = {"RUN": str(run_dir), "TMP": str(tmp_path), "FOLDER_CARD": str(tmp_path / "odd")}
    filled = [re.sub("|".join(places), lambda found: places[found[0]], text) for text in arguments]
    _is_one_line(module.main(filled), capsys, message)


def test_a_base_that_is_stored_quantised_is_not_merged_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path)
    config = tmp_path / "model" / "config.json"
    stored = '"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true},'
    config.write_text(config.read_text().replace("{", "{" + stored, 1))
    _is_one_line(merge.main([str(folder), "--allow-mismatch"]), capsys, "is quantized.*--base-model")


def _is_one_line(code: int, capsys: pytest.CaptureFixture[str], message: str) -> None:
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert re.search(message, lines[0]), lines[0]
