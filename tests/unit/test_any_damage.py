"""Any damage to the files of a model, a run and its checkpoints.

A checkpoint is whole or not taken; a command ends in a line, touches no file but its output, and what it makes without
a complaint is what it makes of files that are whole.
"""

import contextlib
import hashlib
import io
import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from launcher.commands import main as zerolora
from tests.any_input import HARM, assert_a_line, damage, or_refused, tries
from tests.runs_in_process import as_one_of_many, make_ground, train_alone
from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.commands.estimate import main as estimate
from trainer.commands.export.__main__ import main as export
from trainer.commands.inspect import main as inspect
from trainer.commands.merge import main as merge
from trainer.commands.validate import main as validate
from trainer.contract.folder_lock import FolderLock
from trainer.monitor.report.__main__ import main as report

CODES = {0, 1, 2}
MAX_LINES = 6


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4, and a copy from which damaged files are restored."""
    folder = make_ground(tmp_path_factory.mktemp("damage") / "ground")
    train_alone(folder, dataset__evaluation={"path": str(folder / "held_out.jsonl")})
    shutil.copytree(folder, folder.parent / "whole", symlinks=True)
    return folder


@pytest.fixture(scope="module")
def merged(ground: Path) -> dict[str, torch.Tensor]:
    """The weights that base and adapter come to."""
    assert merge([str(ground / "run"), "--output", str(ground.parent / "merged")]) == 0
    return load_file(ground.parent / "merged" / "model.safetensors")


def files_of(ground: Path, *, but: tuple[str, ...] = ()) -> dict[str, tuple[int, int, str]]:
    """Every file with its size, time and hash; not those below the names in `but`."""
    return {
        str(path.relative_to(ground)): (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(ground.rglob("*"))
        if path.is_file() and not str(path.relative_to(ground)).startswith(but)
    }


@contextlib.contextmanager
def damaged(ground: Path, harm: list[tuple[str, int, str]]) -> Iterator[None]:
    """The ground with harm done to files; as it was before, afterwards."""
    for name, at, what in harm:
        damage(ground / name, at, what)
    try:
        yield
    finally:
        shutil.rmtree(ground)
        shutil.copytree(ground.parent / "whole", ground, symlinks=True)


def ends(run: Callable[[], int]) -> tuple[int, str]:
    """Return exit code and stdout of a command in this process; its stderr is a few lines at most."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run()
        except SystemExit as end:
            code = int(end.code or 0)
    lines = err.getvalue().splitlines()
    assert code in CODES, (code, lines)
    assert "Traceback" not in out.getvalue() and len(lines) <= MAX_LINES, lines
    for line in lines:
        assert_a_line(line)
    assert code == 0 or lines, "it failed without a word"
    return code, out.getvalue()


def as_typed(*arguments: str) -> Callable[[], int]:
    def run() -> int:
        before, sys.argv = sys.argv, ["zerolora", *arguments]
        try:
            return zerolora()
        finally:
            sys.argv = before

    return run


OF_RUN = ["training_config.json", "run.json", "metrics.jsonl", "adapter_model.safetensors", "adapter_config.json",
          "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"]  # fmt: skip
OF_CHECKPOINT = ["adapter_model.safetensors", "adapter_config.json", "training_state-00000.safetensors", "state.json",
                 "rank-00000.safetensors", "COMPLETE"]  # fmt: skip
OF_MODEL = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "chat_template.jinja"]  # fmt: skip
run_files = st.sampled_from([f"run/{name}" for name in OF_RUN])
checkpoint_files = st.builds("run/checkpoint-{}/{}".format, st.sampled_from([2, 4]), st.sampled_from(OF_CHECKPOINT))
model_files = st.sampled_from([f"model/{name}" for name in OF_MODEL])


def harm_to(files: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, int, str]]]:
    return st.lists(st.tuples(files, st.integers(0, 100_000), HARM), min_size=1, max_size=2)


@given(harm_to(checkpoint_files))
@tries(30)
def test_a_checkpoint_is_whole_or_not_taken(ground: Path, harm: list[tuple[str, int, str]]) -> None:
    """Whatever is chosen to go on from is as it was written, to the last bit."""
    with damaged(ground, harm):
        before = files_of(ground)
        for setting in ("latest", "auto", str(ground / "run" / "checkpoint-4")):
            choice = or_refused(lambda setting=setting: choose_checkpoint(setting, ground / "run", verify=True))  # type: ignore[misc]
            if choice is not None and choice.checkpoint is not None:
                whole = ground.parent / "whole" / "run" / choice.checkpoint.name
                for file in whole.iterdir():
                    assert (choice.checkpoint / file.name).read_bytes() == file.read_bytes(), file.name
                assert choice.warning or choice.checkpoint.name == "checkpoint-4"
        assert files_of(ground) == before


@example([("run/run.json", 0, "flip")])
@example([("run/tokenizer.json", 9, "cut")])
@given(harm_to(run_files | model_files))
@tries(6)
def test_what_is_merged_is_what_was_trained(
    ground: Path, merged: dict[str, torch.Tensor], harm: list[tuple[str, int, str]]
) -> None:
    with damaged(ground, harm):
        before = files_of(ground, but=("run/merged",))
        code, _ = ends(lambda: merge([str(ground / "run")]))
        if code:
            assert not (ground / "run" / "merged").exists()
        assert files_of(ground, but=("run/merged",)) == before
        if code == 0 and not any(name == "model/model.safetensors" for name, _, _ in harm):
            got = load_file(ground / "run" / "merged" / "model.safetensors")
            assert got.keys() == merged.keys() and all(torch.equal(got[name], merged[name]) for name in merged)


@pytest.mark.parametrize("form", ["merge", "peft", "hf", "gguf", "ollama", "gguf alone"])
def test_a_disk_that_takes_no_more_is_named_in_a_line(
    ground: Path, merged: dict[str, torch.Tensor], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is written, to the first file or, `alone`, to the file after the merged weights; nothing is left."""
    most = sum(value.nbytes for value in merged.values()) + 4096 if form == "gguf alone" else 4096
    words = [str(ground / "run")] if form == "merge" else [str(ground / "run"), "--format", form.split()[0]]
    with damaged(ground, []):
        before, limits = files_of(ground), resource.getrlimit(resource.RLIMIT_FSIZE)
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            code = merge(words) if form == "merge" else export(words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        line = capsys.readouterr().err.splitlines()[-1]
        assert code == 1 and "the disk at " in line and "free some space" in line, line
        assert_a_line(line)
        assert files_of(ground) == before
        assert not [path for path in (ground / "run").iterdir() if path.name.startswith((".", "export", "merged"))]


@pytest.mark.parametrize("form", ["peft", "gguf", "ollama"])
def test_what_fails_before_it_writes_is_on_no_list(ground: Path, form: str) -> None:
    with damaged(ground, [("run/tokenizer.json", 9, "cut")]):
        before = files_of(ground)
        assert ends(lambda: export([str(ground / "run"), "--format", form]))[0] == 2
        assert files_of(ground) == before


def test_nothing_is_written_into_the_folder_of_a_run_that_trains(ground: Path, tmp_path: Path) -> None:
    """It would be gone with the checkpoint that it lies in, or when another run makes way; reading does no harm."""
    run = f"{ground}/run"
    with damaged(ground, []), FolderLock.acquire(ground / "run", resumes=False, log=print):
        before = files_of(ground, but=("run/logs",))
        for words in ([run], [f"{run}/checkpoint-2"], [run, "--output", f"{run}/a/b"]):
            assert ends(lambda words=words: merge(words))[0] == 2  # type: ignore[misc]
            for form in ("peft", "gguf"):
                assert ends(lambda words=words, form=form: export([*words, "--format", form]))[0] == 2  # type: ignore[misc]
        assert ends(lambda: merge([run, "--output", str(tmp_path / "m")]))[0] == 0
        assert files_of(ground, but=("run/logs",)) == before


@example([("run/training_config.json", 4, "flip")])
@example([("run/tokenizer.json", 9, "cut")])
@given(harm_to(run_files))
@tries(12)
def test_commands_on_a_damaged_run(ground: Path, harm: list[tuple[str, int, str]]) -> None:
    with damaged(ground, harm):
        outputs = ("run/report.html", "run/export")
        before = files_of(ground, but=outputs)
        ends(as_typed("status", str(ground / "run")))
        ends(lambda: report([str(ground / "run")]))
        code, _ = ends(lambda: export([str(ground / "run"), "--format", "peft"]))
        assert code == 0 or not (ground / "run" / "export-peft").exists()
        assert files_of(ground, but=outputs) == before


@given(harm_to(model_files))
@tries(4)
def test_commands_on_a_damaged_model(ground: Path, harm: list[tuple[str, int, str]]) -> None:
    config = [str(ground / "base.yaml"), f"output_dir={ground}/new"]
    with damaged(ground, harm):
        before = files_of(ground, but=("cache",))
        for command in (validate, estimate, inspect):
            ends(lambda command=command: command(config))  # type: ignore[misc]
        assert files_of(ground, but=("cache",)) == before


odd_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(odd_json | st.fixed_dictionaries({"step": odd_json, "train/loss": odd_json}), max_size=4),
    st.binary(max_size=9),
)
@tries(5)
def test_status_and_report_of_odd_metrics(ground: Path, lines: list[Any], end: bytes) -> None:
    with damaged(ground, []):
        metrics = ground / "run" / "metrics.jsonl"
        odd = "".join(json.dumps(line) + "\n" for line in lines).encode()
        for content in (odd + end, metrics.read_bytes() + odd + end):
            metrics.write_bytes(content)
            ends(as_typed("status", str(ground / "run")))
            ends(lambda: report([str(ground / "run")]))
            assert metrics.read_bytes() == content


@example("run.json", 1, None, False)
@example("training_config.json", 0, {}, False)
@given(
    st.sampled_from(["run.json", "training_config.json", "adapter_config.json", "tokenizer_config.json"]),
    st.integers(0, 60),
    odd_json,
    st.booleans(),
)
@tries(12)
def test_commands_on_records_with_an_odd_value(ground: Path, name: str, at: int, value: Any, whole: bool) -> None:
    """Replace the whole file or one of its entries by well-formed JSON with values that nobody wrote."""
    with damaged(ground, []), as_one_of_many():
        file = ground / "run" / name
        record = json.loads(file.read_text())
        record[sorted(record)[at % len(record)]] = value
        file.write_text(json.dumps(value if whole else record))
        for command in (as_typed("status", str(ground / "run")), lambda: report([str(ground / "run")])):
            ends(command)
        ends(lambda: export([str(ground / "run"), "--format", "peft"]))
