"""Files of a run that somebody else may have written: whatever they hold is one message, or ignored, never a traceback.

Random bytes, random JSON, and the file's own JSON with values replaced by random ones.
"""

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.commands import main as zerolora
from launcher.doctor.command import parse_doctor_output
from launcher.job_attempts import build_resume_settings
from launcher.start import AttemptRunner
from launcher.status import describe_run
from launcher.supervision.observer import add_host_names
from launcher.supervision.remote import SrunRanks, SshRanks
from launcher.supervision.restarts import AttemptResult, RestartLoop
from launcher.targets.hostfile import read_hostfile
from launcher.targets.local import write_environment
from launcher.targets.slurm import Allocation
from tests.any_input import assert_a_line, or_refused, tries
from trainer.checkpoint.output_folder import check_inputs_and_output
from trainer.config import RunConfig
from trainer.config.errors import UserError, sanitize
from trainer.contract.folder_lock import LockRecord, check_not_locked, describe_live_holder
from trainer.contract.heartbeat import HeartbeatFolder, read_hang_report, read_heartbeats
from trainer.contract.json_records import RESULT_PREFIX, CheckResult, read_sweep
from trainer.contract.restart_record import RestartNote, read_restarts
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.sample_images import find_sample_images
from trainer.monitor.report.sweep_table import read_run_results
from trainer.monitor.report.write import write_report
from trainer.tasks.language import LanguageTask

ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x9b2J\x1b[2J"
BEAT: dict[str, Any] = {
    "rank": 0, "host": "n1", "pid": 1, "step": 41, "phase": "backward", "collective": None, "place": None,
    "collectives_begun": None, "idle_s": 0.0, "stuck": False, "free_memory_gib": 1.0, "free_shm_gib": 1.0,
    "time": 1.0, "exit_code": None, "first_step": 1, "device_reached": None,
}  # fmt: skip
HOLDER = {"host": "n1", "process": {"kernel": "m", "pid": 1, "started": "1"}}
NOTE = {"step": 3, "batch_size": 2, "gradient_accumulation_steps": 4, "stage": 2}
RESTART = {"time": 1.0, "reason": "r", "step": 3, "checkpoint": "", "ranks": 2}
RECORD: Record = {
    "step": 40,
    "time": 5.0,
    "train/loss": 1.25,
    "eval/loss": 1.0,
    "train/epoch": 0.8,
    "perf/step_ms": 500.0,
}
RUN = {
    "started": "2026", "command": ["zerolora"], "world_size": 2, "device": "cpu", "device_name": "cpu",
    "python": "3.11", "packages": {}, "commit": None,
}  # fmt: skip
CONFIG = {"base_model": "m", "output_dir": "run", "dataset": {"path": "d"}}
JSON_FILES: dict[str, Any] = {
    "logs/lock.json": {"token": "t", "since": "s", "job": "", "restarts": 0, "holders": [HOLDER, HOLDER]},
    "logs/heartbeat-0.json": BEAT,
    "logs/hang.json": {"ranks": [0], "text": "the run is hung: rank 0 has sent no heartbeat"},
    "logs/out_of_memory.json": NOTE,
    "logs/restarts.json": [RESTART, RESTART],
    "logs/slurm-starts.json": [{"job": "7", "newest": "checkpoint-2", "record": 5, "code": 75}],
    "metrics.jsonl": RECORD,
    "sweep.json": {"runs": [{"folder": "run/a", "digest": "d", "exit_code": 0, "settings": ["seed=1"]}]},
    "run.json": RUN,
    "training_config.json": CONFIG,
    "answers.json": {"prompt": {"before": "a", "after": "b"}},
    "time_by_phase.json": {"load": 1.0},
    "examples.json": [["chosen", [[1.0, "a"], [0.0, "b"]]]],
    "samples/prompts.json": ["a prompt"],
}
OTHER_FILES = {
    "logs/slurm-job": "7",
    "hostfile": "n1 slots=2\nn2 slots=2\n",
    ".deepspeed_env": "A=1\n",
}
"""Further names: in samples/ and checkpoint-*."""
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([2**70, -(2**70), 10**400, -1, 0, 1e308, -1e308, 1e-308, True])
)
texts = st.one_of(st.text(max_size=20), st.sampled_from([ESCAPES, "\ud800", "NaN", "4", "a\nb", "[red]x"]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=6,
)
raw = st.one_of(
    st.binary(max_size=200), st.sampled_from([b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"9" * 5_000])
)


def paths_in(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a JSON tree are."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [above, *(path for key, value in inner for path in paths_in(value, (*above, key)))]


@st.composite
def changed_json(draw: st.DrawFn, name: str) -> bytes:
    """The file with up to three values replaced, or left out."""
    tree = copy.deepcopy(JSON_FILES[name])
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from([path for path in paths_in(tree) if path] or [("step",)]))
        node = tree
        for key in above:
            node = node[key]
        if isinstance(node, dict) and draw(st.booleans()):
            node.pop(last, None)
        else:
            node[last] = draw(values)
    return json.dumps(tree).encode(errors="surrogatepass")


@st.composite
def damage(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file and what it holds now."""
    name = draw(st.sampled_from([*JSON_FILES, *JSON_FILES, *OTHER_FILES]))
    if name in OTHER_FILES:
        return name, draw(st.one_of(raw, texts.map(lambda text: text.encode(errors="surrogatepass"))))
    return name, draw(st.one_of(raw, values.map(lambda value: json.dumps(value).encode()), changed_json(name)))


@contextlib.contextmanager
def run_with(folder: Path, name: str, content: bytes | None) -> Iterator[Path]:
    """A run's folder in which one file holds something else, or is a folder for None; in the directory above it."""
    with contextlib.chdir(folder):
        run = Path("run")
        for file, value in JSON_FILES.items():
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).write_text(json.dumps(value) + "\n")
        for file, text in OTHER_FILES.items():
            (run / file).write_text(text)
        Path("c.yaml").write_text(json.dumps(CONFIG))
        if content is None:
            (run / name).unlink()
            (run / name).mkdir()
        else:
            (run / name).write_bytes(content)
        try:
            yield run
        finally:
            if content is None:
                (run / name).rmdir()


SSH, SRUN = SshRanks({"n1": [0], "n2": [0]}), SrunRanks(Allocation(7, ("n1", "n2"), 1))


def read_everything(run: Path, name: str) -> None:
    """Call every reader; each ends, or refuses in one line. Pages are drawn where the file has a part in them."""
    logs, config = run / "logs", RunConfig.model_validate(CONFIG)
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    lines = or_refused(lambda: describe_run(run))
    for _, value in lines or ():
        assert value
    readers: list[Callable[[], object]] = [
        lambda: describe_live_holder(run),
        lambda: check_not_locked(run, resumes=False),
        lambda: [beat.describe_position() for beat in read_heartbeats(logs).values()],
        lambda: HeartbeatFolder(logs, 0, 2).read(),
        lambda: [add_host_names(hang, remote) for remote in (SSH, SRUN, None) if (hang := read_hang_report(logs))],
        lambda: AttemptResult.from_heartbeats(logs, 1, None, 2),
        lambda: read_restarts(run),
        lambda: RestartNote.take(logs),
        lambda: RestartLoop(run, lambda settings: AttemptResult(0), max_restarts=3, resumes=True).run(),
        lambda: build_resume_settings(config.model_copy(update={"output_dir": str(run)}), environment),
        lambda: read_metrics(run),
        lambda: read_sweep(run),
        lambda: read_run_results(run),
        lambda: read_hostfile(run / "hostfile"),
        lambda: check_inputs_and_output(config.model_copy(update={"output_dir": str(run)})),
        lambda: AttemptRunner._read_global_batch(_attempts_in(run)),
    ]
    if not name.startswith("logs/") or name == "logs/restarts.json":
        readers += [
            lambda: write_report(run),
            lambda: LanguageTask.build_model_card(config, run, [RECORD], "n"),
            lambda: find_sample_images(run),
        ]
    for reader in readers:
        or_refused(reader)
    with contextlib.chdir(run):
        or_refused(lambda: write_environment(Path("environment"), {}))


def _attempts_in(run: Path) -> AttemptRunner:
    attempts = AttemptRunner.__new__(AttemptRunner)
    attempts._logs = run / "logs"
    return attempts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@example(("logs/lock.json", b"K\xf6ln"))
@example(("logs/lock.json", json.dumps(JSON_FILES["logs/lock.json"]).replace('"pid": 1', f'"pid": {2**70}').encode()))
@example(("logs/heartbeat-0.json", json.dumps(BEAT | {"time": None}).encode()))
@example(("logs/heartbeat-0.json", json.dumps(BEAT | {"step": "x", "host": 5}).encode()))
@example(("metrics.jsonl", json.dumps({"step": 1, "train/loss": 1.0}).encode() + b"\n" + json.dumps(RECORD).encode()))
@example(("metrics.jsonl", json.dumps(RECORD | {"time": None}).encode() + b"\n" + json.dumps(RECORD).encode()))
@example(("metrics.jsonl", json.dumps(RECORD | {"step": 10**400}).encode()))
@example(("sweep.json", b'{"runs": ' + b"[" * 100_000))
@example(("hostfile", "# Köln\nn1 slots=1\n".encode("latin-1")))
@example(("logs/out_of_memory.json", b"[]"))
@example(("logs/slurm-job", b"--help"))
@example(("run.json", b'{"world_size": "x"}'))
@example(("training_config.json", b'{"base_model": "", "output_dir": "", "dataset": {}}'))
@given(damage())
@tries(30)
def test_a_damaged_file_is_one_message_for_every_reader(place: Path, harm: tuple[str, bytes]) -> None:
    with run_with(place, *harm) as run:
        read_everything(run, harm[0])


@pytest.mark.parametrize("name", [*JSON_FILES, *OTHER_FILES])
def test_a_folder_in_place_of_a_file(place: Path, name: str) -> None:
    with run_with(place, name, None) as run:
        read_everything(run, name)


def run_command(*words: str) -> tuple[int, str]:
    """The exit code and what is printed."""
    from io import StringIO

    out, argv = StringIO(), sys.argv
    sys.argv = ["zerolora", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = zerolora()
    finally:
        sys.argv = argv
    return code, out.getvalue()


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("logs/heartbeat-0.json", "host", "status run"),
        ("logs/heartbeat-0.json", "phase", "status run"),
        ("logs/lock.json", "since", "train c.yaml"),
    ],
)
def test_no_escape_sequence_reaches_the_terminal(place: Path, name: str, field: str, words: str) -> None:
    tree = JSON_FILES[name] | {field: ESCAPES}
    if name == "logs/lock.json":
        tree["holders"] = list(_asdict(LockRecord.for_current_process())["holders"])
    with run_with(place, name, json.dumps(tree | ({"time": time.time()} if "time" in tree else {})).encode()):
        code, printed = run_command(*words.split())
    assert "red" in printed and "\x1b" not in printed and "\x9b" not in printed and "owned" not in printed
    assert code == (2 if words.startswith("train") else 0)


def _asdict(lock: LockRecord) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(lock)


def test_names_and_errors_are_printable(place: Path) -> None:
    assert sanitize(f"a{ESCAPES}b\tc\nd\r\x00\x7f") == "aredb\tc\nd"
    assert_a_line(str(UserError(f"{ESCAPES}: {ESCAPES}")))
    assert "\x1b" not in str(UserError(ESCAPES))
    record = {"runs": [{"folder": f"run/{ESCAPES}", "digest": "", "exit_code": 1, "settings": []}]}
    from rich.console import Console

    from trainer.monitor.report.sweep_table import print_table

    with run_with(place, "sweep.json", json.dumps(record).encode()) as run:
        console = Console(file=open(os.devnull, "w"), record=True, soft_wrap=True)
        print_table(console, read_run_results(run))
    assert "red" in console.export_text() and "\x1b" not in console.export_text()


@given(st.one_of(texts, st.binary(max_size=60).map(lambda data: data.decode("latin-1"))))
@tries(40)
def test_answers_of_other_hosts_may_hold_anything(text: str) -> None:
    whole = f"{RESULT_PREFIX}n1 {json.dumps([asdict(CheckResult('ssh', 'OK', 'fine'))])}\n"
    assert [check.host for check in parse_doctor_output(f"{text}\n{whole}", "n1")] == ["n1"]
    for damaged in (f"{RESULT_PREFIX}{text}", f"{RESULT_PREFIX}n1 {text}", f"{whole[:-5]}{text}"):
        assert parse_doctor_output(damaged, "n1") == []
