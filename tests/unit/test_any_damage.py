"""Any damage to a run's checkpoints and records: a checkpoint is whole or not taken, a command ends in a line."""

import contextlib
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.commands import main as zerolora
from tests.any_input import HARM, assert_a_line, damage, or_refused, tries
from tests.runs_in_process import make_ground, train
from trainer.checkpoint.checkpoint_files import choose_checkpoint
from trainer.monitor.report.__main__ import main as report

CODES = {0, 1, 2}
MOST_LINES = 6


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints at 2 and 4, and a copy of all of it to mend what is damaged from."""
    folder = make_ground(tmp_path_factory.mktemp("damage") / "ground")
    train(folder, dataset__evaluation={"path": str(folder / "held_out.jsonl")})
    shutil.copytree(folder, folder.parent / "whole", symlinks=True)
    return folder


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
    """The exit code and stdout of a command in this process, whose stderr is a few lines at most."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run()
        except SystemExit as end:
            code = int(end.code or 0)
    lines = err.getvalue().splitlines()
    assert code in CODES, (code, lines)
    assert "Traceback" not in out.getvalue() and len(lines) <= MOST_LINES, lines
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


OF_CHECKPOINT = ["adapter_model.safetensors", "adapter_config.json", "training_state.safetensors", "state.json",
                 "rank-00000.safetensors", "COMPLETE"]  # fmt: skip
checkpoint_files = st.builds("run/checkpoint-{}/{}".format, st.sampled_from([2, 4]), st.sampled_from(OF_CHECKPOINT))


def harm_to(files: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[str, int, str]]]:
    return st.lists(st.tuples(files, st.integers(0, 100_000), HARM), min_size=1, max_size=2)


@given(harm_to(checkpoint_files))
@tries(30)
def test_a_checkpoint_is_whole_or_not_taken(ground: Path, harm: list[tuple[str, int, str]]) -> None:
    """Whatever is chosen to go on from is as it was written, to the last bit."""
    with damaged(ground, harm):
        before = files_of(ground)
        for setting in ("latest", "auto", str(ground / "run" / "checkpoint-4")):
            choice = or_refused(lambda setting=setting: choose_checkpoint(setting, ground / "run", read=True))  # type: ignore[misc]
            if choice is not None and choice.checkpoint is not None:
                whole = ground.parent / "whole" / "run" / choice.checkpoint.name
                for file in whole.iterdir():
                    assert (choice.checkpoint / file.name).read_bytes() == file.read_bytes(), file.name
                assert choice.warning or choice.checkpoint.name == "checkpoint-4"
        assert files_of(ground) == before


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
