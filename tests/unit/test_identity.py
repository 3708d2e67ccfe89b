"""Every command that loads an adapter compares it with what it was trained on, and takes all of its tensors."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.runs_in_process import make_ground, train
from tests.tiny import make_model, write_chats
from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.checkpoint.finished_run import find_run, load_saved_tokenizer, load_trained_model
from trainer.commands import chat, evaluate, generate, merge, push
from trainer.commands.export import __main__ as export
from trainer.commands.prepare_run import main as prepare
from trainer.config import UserError
from trainer.data.conversations import render_prompt

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, which held out a fifth of its data, and another base of the same shapes."""
    folder = make_ground(tmp_path_factory.mktemp("identity"))
    train(folder, dataset__val_split=0.2)
    make_model(folder / "other", seed=9)
    return folder


@pytest.fixture
def run_dir(ground: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may change."""
    return shutil.copytree(ground / "run", tmp_path / "run")


@pytest.fixture
def base(ground: Path) -> Iterator[Path]:
    """The run's base, restored after the test."""
    kept = shutil.copytree(ground / "model", ground / "kept")
    yield ground / "model"
    shutil.rmtree(ground / "model")
    kept.rename(ground / "model")


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "merge": lambda run, out: [str(run), "--output", str(out)],
    "eval": lambda run, out: [str(run), "--samples", "5", "--json", str(out)],
    "generate": lambda run, out: [str(run), "hello", "--max-new-tokens", "2"],
    "chat": lambda run, out: [str(run)],
    "export": lambda run, out: [str(run), "--format", "vllm", "--output", str(out)],
    "push": lambda run, out: [str(run), "me/tiny", "--dry-run"],
}
MODULES = {"eval": evaluate, "export": export, "merge": merge, "generate": generate, "chat": chat, "push": push}


def refusal(capsys: pytest.CaptureFixture[str], command: str, run: Path, out: Path, *more: str) -> list[str]:
    capsys.readouterr()
    code = MODULES[command].main([*COMMANDS[command](run, out), *more])
    said = capsys.readouterr()
    assert code == 2 and not said.out and not out.exists(), (code, said)
    return said.err.splitlines()


@pytest.mark.parametrize("place", ["run", "run/checkpoint-2"])
@pytest.mark.parametrize("command", COMMANDS)
def test_another_base_is_refused(
    command: str, place: str, ground: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same shapes, with other weights: as an -Instruct model next to the base that it was made from."""
    [line] = refusal(capsys, command, ground / place, tmp_path / "out", "--base-model", str(ground / "other"))
    assert line.startswith(f"error: --base-model={ground}/other: its weight files differ from {ground}/model"), line
    assert str(ground / place) in line and "--allow-mismatch" in line


@pytest.mark.parametrize("command", ["merge", "eval", "generate"])
def test_another_base_is_taken_where_the_user_allows_it(command: str, ground: Path, tmp_path: Path) -> None:
    more = ["--base-model", str(ground / "other"), "--allow-mismatch"]
    assert MODULES[command].main([*COMMANDS[command](ground / "run", tmp_path / "out"), *more]) == 0


def test_the_same_base_elsewhere_is_the_same(ground: Path, tmp_path: Path) -> None:
    shutil.copytree(ground / "model", tmp_path / "moved")
    find_run(ground / "run", str(tmp_path / "moved"))


def test_a_base_that_changed_in_place_is_refused(ground: Path, base: Path) -> None:
    make_model(base, seed=5)
    with pytest.raises(UserError, match=r"weight files differ from those on which .*run was trained.*--allow-mismatch"):
        find_run(ground / "run")
    find_run(ground / "run", allow_mismatch=True)


def test_a_base_that_is_not_here_is_not_compared_where_it_is_not_loaded(ground: Path) -> None:
    assert push.main([str(ground / "run"), "me/tiny", "--dry-run", "--base-model", "owner/elsewhere"]) == 0


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "alpha": (
        lambda run: edit(run / "adapter_config.json", lora_alpha=1),
        "adapter_config.json was changed after",
    ),
    "tokenizer": (
        lambda run: edit(run / "tokenizer.json", truncation=None),
        "tokenizer.json was changed after",
    ),
    "template": (
        lambda run: (run / "chat_template.jinja").write_text("{{ 1 }}"),
        "chat_template.jinja was changed after",
    ),
    "no template": (
        lambda run: (run / "chat_template.jinja").unlink(),
        "chat_template.jinja was deleted after",
    ),
    "quantisation": (lambda run: edit(run / "training_config.json", adapter="qlora"), "adapter=qlora: .* with lora"),
}


@pytest.mark.parametrize("place", [".", "checkpoint-2"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_was_edited_since_is_refused(case: str, place: str, run_dir: Path) -> None:
    """In the folder that is named; settings of the run are those of its checkpoints as well."""
    change, message = CHANGES[case]
    change(run_dir if case == "quantisation" else run_dir / place)
    with pytest.raises(UserError, match=f"{message}.*--allow-mismatch"):
        find_run(run_dir / place)
    find_run(run_dir / place, allow_mismatch=True)


def test_the_template_that_was_used_is_used_again(ground: Path, tmp_path: Path) -> None:
    """Not what its file holds now, in any command."""
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}")
    train(ground, output_dir=str(tmp_path / "run"), dataset__chat_template=str(file), training__max_steps=1)
    for change in (lambda: file.write_text("{{ messages }}"), file.unlink):
        change()
        run = find_run(tmp_path / "run")
        shown = render_prompt(load_saved_tokenizer(run), run.config.dataset, [{"role": "user", "content": "why"}])
        assert shown.startswith("[user] why</s>")
        assert evaluate.main([str(tmp_path / "run"), "--data", str(ground / "held_out.jsonl")]) == 0


@pytest.mark.parametrize("lost", ["the file", "its content"])
def test_a_run_without_its_record_is_refused(lost: str, run_dir: Path, ground: Path) -> None:
    """Nobody can tell whether the base is the one that it was trained on."""
    if lost == "the file":
        (run_dir / "run.json").unlink()
    else:
        edit(run_dir / "run.json", identity=None, checksums={})
    with pytest.raises(UserError, match=r"run\.json.*is missing or incomplete; restore it, or .*--allow-mismatch"):
        find_run(run_dir, str(ground / "other"))
    find_run(run_dir, str(ground / "other"), allow_mismatch=True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.tensor(1, dtype=torch.int32), "is int32; use a 16-bit or fp32 adapter"),
        (torch.tensor(1j), "is complex64; use a 16-bit or fp32 adapter"),
        (torch.tensor(torch.nan), "contains NaN or infinity; use an earlier checkpoint"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(
    value: torch.Tensor, problem: str, command: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without checksums, as in the runs of others."""
    edit(run_dir / "run.json", checksums={})
    save_file(
        {name: value.expand(w.shape).clone() for name, w in load_file(run_dir / WEIGHTS).items()}, run_dir / WEIGHTS
    )
    [line] = refusal(capsys, command, run_dir, tmp_path / "out")
    assert line.startswith(f"error: {run_dir}: base_model.") and problem in line


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("run.json", "prompt_text", "false", 'prompt_text="false": must contain {prompt}, and no other placeholder'),
        (
            "run.json",
            "prompt_text",
            "{prompt} {other}",
            'prompt_text="{prompt} {other}": must contain {prompt}, and no',
        ),
        ("run.json", "prompt_text", False, "prompt_text=false: must be a string, not false"),
        ("run.json", "working_directory", 5, "working_directory=5: must be a string"),
        ("run.json", "checksums", [1], "checksums=[1]: must be a mapping"),
        ("run.json", "identity", 5, "identity=5: must be a mapping"),
        ("adapter_config.json", "lora_alpha", float("nan"), "lora_alpha=nan: must be a finite number"),
    ],
)
def test_a_wrong_value_in_the_record_is_named(name: str, key: str, value: Any, problem: str, run_dir: Path) -> None:
    edit(run_dir / name, **{key: value})
    with pytest.raises(UserError, match=f"{name}:? {re.escape(problem)}"):
        find_run(run_dir)


def starts(ground: Path, adapter: Path, *more: str) -> int:
    return prepare([str(ground / "base.yaml"), f"output_dir={ground}/new", f"lora.adapter_path={adapter}", *more])


def test_training_does_not_start_from_an_adapter_of_another_base(
    ground: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"base_model={ground}/other"
    for adapter in (ground / "run", ground / "run" / "checkpoint-2"):
        assert starts(ground, adapter) == 0
        capsys.readouterr()
        assert starts(ground, adapter, other) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "its weight files differ from" in line and "lora.allow_mismatch: true" in line
        assert starts(ground, adapter, other, "lora.allow_mismatch=true") == 0
        assert "its weight files differ from" in capsys.readouterr().out


def test_training_does_not_start_from_an_adapter_of_another_tokenizer(
    ground: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens have changed places; another chat template alone is no other tokenizer."""
    other = shutil.copytree(ground / "model", tmp_path / "other")
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    assert starts(ground, ground / "run", f"model.tokenizer={other}", "dataset.train_on=all") == 0
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert starts(ground, ground / "run", f"model.tokenizer={other}") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"model.tokenizer={other}: not the tokenizer that {ground}/run was trained with" in line
    assert starts(ground, ground / "run", f"model.tokenizer={other}", "lora.allow_mismatch=true") == 0


@pytest.mark.parametrize("place", [".", "checkpoint-2"])
def test_training_does_not_start_from_an_adapter_that_was_edited(
    place: str, ground: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run_dir / place / "adapter_config.json", lora_alpha=64)
    assert starts(ground, run_dir / place) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "adapter_config.json was changed after training; undo the change" in line
    assert "lora.allow_mismatch: true" in line
    assert starts(ground, run_dir / place, "lora.allow_mismatch=true") == 0


def test_an_adapter_without_a_record_is_compared_by_the_name_of_its_base(
    ground: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT records nothing else; it is a hint, and no reason to refuse."""
    (run_dir / "run.json").unlink()
    assert starts(ground, run_dir) == 0
    assert "adapter_config.json names" not in capsys.readouterr().out
    edit(run_dir / "adapter_config.json", base_model_name_or_path="owner/another")
    assert starts(ground, run_dir) == 0
    assert "adapter_config.json names owner/another" in capsys.readouterr().out


def test_data_that_grew_is_not_split_again(ground: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was trained on would be evaluated."""
    file = ground / "train.jsonl"
    before = file.read_bytes()
    try:
        file.write_bytes(before + write_chats(tmp_path / "more.jsonl", 20, seed=8).read_bytes())
        [line] = refusal(capsys, "eval", ground / "run", tmp_path / "out")
        assert f"dataset.path={file}: not the data" in line and "--data" in line and "--allow-mismatch" in line
        assert evaluate.main([str(ground / "run"), "--samples", "5", "--allow-mismatch"]) == 0
        assert evaluate.main([str(ground / "run"), "--samples", "5", "--data", str(tmp_path / "more.jsonl")]) == 0
    finally:
        file.write_bytes(before)
    assert evaluate.main([str(ground / "run"), "--samples", "5"]) == 0
    assert "is the training data" not in capsys.readouterr().err
    assert evaluate.main([str(ground / "run"), "--samples", "5", "--data", str(file)]) == 0
    assert f"warning: --data={file}: is the training data, so it cannot show overfitting" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"val_split": 0.5}, {"split": "train[:30]"}, {"max_samples": 30}])
def test_another_split_is_refused(change: dict[str, Any], run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((run_dir / "training_config.json").read_text())
    edit(run_dir / "training_config.json", dataset=config["dataset"] | change)
    assert evaluate.main([str(run_dir)]) == 2
    assert f"dataset.{next(iter(change))}=" in capsys.readouterr().err


# Tensors that PEFT would drop, or leave as they were drawn.


def unrecorded(run_dir: Path) -> None:
    (run_dir / "run.json").unlink()


def test_an_adapter_of_more_layers_is_refused(run_dir: Path, ground: Path, tmp_path: Path) -> None:
    unrecorded(run_dir)
    shorter = find_run(run_dir, str(make_model(tmp_path / "shorter", layers=1)), allow_mismatch=True)
    with pytest.raises(UserError, match=r"14 of the 28 tensors of the adapter match no layer .*first: .*layers\.1\."):
        load_trained_model(shorter, load_saved_tokenizer(shorter), torch.device("cpu"))
    with pytest.raises(UserError, match="14 of the 28 tensors"):
        export.export(shorter, "vllm", tmp_path / "out")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    edit(run_dir / "adapter_config.json", target_modules=names)
    longer = find_run(run_dir, str(make_model(tmp_path / "longer", layers=3)), allow_mismatch=True)
    with pytest.raises(UserError, match=r"14 tensors of the adapted model are not in the file .*first: .*layers\.2\."):
        load_trained_model(longer, load_saved_tokenizer(longer), torch.device("cpu"))


@pytest.mark.parametrize("command", ["merge", "eval", "generate", "export"])
@pytest.mark.parametrize("case", ["no targets", "fewer targets", "no B", "another shape", "unknown tensor"])
def test_a_tensor_that_is_not_taken_is_refused(
    command: str, case: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unrecorded(run_dir)
    tensors = load_file(run_dir / WEIGHTS)
    [name, *_] = [name for name in tensors if ".layers.1.mlp.up_proj.lora_B" in name]
    if case.endswith("targets"):
        edit(run_dir / "adapter_config.json", target_modules=None if case == "no targets" else ["up_proj"])
    elif case == "no B":
        del tensors[name]
    elif case == "another shape":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        tensors[name.replace("up_proj", "upper_proj")] = tensors[name].clone()
    save_file(tensors, run_dir / WEIGHTS, metadata={"format": "pt"})
    # Before it, what --allow-mismatch accepts: the adapter was changed.
    *_, line = refusal(capsys, command, run_dir, tmp_path / "out", "--allow-mismatch")
    assert re.search(r"does not match .*(of the \d+ tensors|are not in the file|has shape)", line), line


def test_training_does_not_start_from_half_an_adapter(ground: Path, run_dir: Path, tmp_path: Path) -> None:
    unrecorded(run_dir)
    edit(run_dir / "adapter_config.json", target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"lora.adapter_path=.*: does not match this model: 24 of the 28 tensors"):
        train(ground, lora__adapter_path=str(run_dir), output_dir=str(tmp_path / "new"))


# Damaged files of a run.

FILES = [
    *("adapter_config.json", WEIGHTS, "run.json", "training_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "chat_template.jinja"),
]
IN_CHECKPOINT = [
    f"checkpoint-2/{name}"
    for name in ("adapter_config.json", WEIGHTS, "tokenizer.json", "chat_template.jinja", "state.json", "COMPLETE",
                 "training_state-00000.safetensors", "rank-00000.safetensors")
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def load(folder: Path) -> int:
    """Find and load a run or checkpoint as commands do, and resume it; return how many of both were refused.

    Whatever is wrong is a UserError of one line.
    """

    def load_adapter() -> None:
        run = find_run(folder)
        load_trained_model(run, load_saved_tokenizer(run), torch.device("cpu"))

    def resume() -> None:
        if folder.name.startswith("checkpoint-"):
            choose_checkpoint(str(folder), folder.parent, verify=True)

    refused = 0
    for action in (load_adapter, resume):
        try:
            action()
        except UserError as error:
            messages = getattr(error, "messages", [str(error)])
            assert messages and all(message.strip() and "\n" not in message for message in messages)
            refused += 1
    return refused


@example("checkpoint-2/state.json", b"[]")
@example("checkpoint-2/rank-00000.safetensors", b"\x80")
@given(
    st.sampled_from(FILES + IN_CHECKPOINT),
    st.binary(max_size=300) | st.sampled_from([b"[" * 100_000, b"\x80\x02}", b"{}", b"[]"]),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_random_bytes_in_any_file_of_a_run_are_one_message(ground: Path, name: str, content: bytes) -> None:
    file = ground / "run" / name
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        refused = load(file.parent)
        assert refused, "bytes that nobody wrote were taken"
    finally:
        file.write_bytes(before)


@given(st.sampled_from(["adapter_config.json", "run.json"]), st.integers(0, 60), json_values)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_value_in_the_records_of_a_run_is_one_message(ground: Path, name: str, at: int, value: Any) -> None:
    """Without checksums, by which any edit would be noticed."""
    kept = {each: (ground / "run" / each).read_bytes() for each in (name, "run.json")}
    try:
        edit(ground / "run" / "run.json", checksums={})
        record = json.loads((ground / "run" / name).read_text())
        edit(ground / "run" / name, **{sorted(record)[at % len(record)]: value})
        load(ground / "run")
    finally:
        for each, content in kept.items():
            (ground / "run" / each).write_bytes(content)
