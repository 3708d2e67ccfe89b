"""Heartbeats, who is behind, what counts as work, and what a note costs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from launcher.supervision.observer import Observer
from trainer.contract.heartbeat import (
    LINE_BYTES,
    HangReport,
    Heartbeat,
    HeartbeatFolder,
    clear_rank_reports,
    read_hang_report,
    read_heartbeats,
)
from trainer.contract.rendezvous import get_host_name
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.process_state import (
    ActivityDetector,
    find_collective,
    find_location,
    get_main_thread_frame,
    read_free_host_memory,
)
from trainer.parallel.ranks.progress import PROGRESS, Progress
from trainer.parallel.ranks.watchdog import Watchdog, describe_hang, find_ranks_behind

BEAT = Heartbeat(
    rank=0, host="n0", pid=100, step=412, phase="backward", collective="all_reduce", place="step.py:1 train_step",
    collectives_begun=7, idle_s=660.0, stuck=True, free_memory_gib=1.0, free_shm_gib=1.0, time=1.0,
    device_reached=22,
)  # fmt: skip


def beats(**of_rank_1: object) -> dict[int, Heartbeat]:
    """Three ranks in the same collective, but for what rank 1 does."""
    found = {rank: replace(BEAT, rank=rank, host=f"n{rank}") for rank in range(3)}
    found[1] = replace(found[1], **of_rank_1)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("of_rank_1", "silent", "behind"),
    [
        ({}, {1}, [1]),
        ({"step": 411}, set(), [1]),
        ({"step": 411, "collective": None}, {2}, [2]),
        ({"collectives_begun": 6}, set(), [1]),
        ({"device_reached": 21}, set(), [1]),
        ({"device_reached": 23}, set(), [0, 2]),
        ({"device_reached": 21, "step": 413}, set(), [0, 2]),
        ({"device_reached": None}, set(), [0, 1, 2]),
        ({"collective": None, "phase": "forward"}, set(), [1]),
        ({"collective": None, "collectives_begun": None}, set(), [1]),
        ({"step": 413, "collective": None}, set(), [0, 2]),
        ({}, set(), [0, 1, 2]),
    ],
    ids=[
        "silent",
        "step",
        "silence first",
        "collective",
        "device",
        "device ahead",
        "device in the next step",
        "no device",
        "outside",
        "no record",
        "ahead",
        "network",
    ],
)
def test_who_is_behind(of_rank_1: dict[str, object], silent: set[int], behind: list[int]) -> None:
    assert find_ranks_behind(beats(**of_rank_1), silent) == behind


def test_time_by_phase_is_that_of_the_outermost_and_steps_are_the_rest() -> None:
    began = time.monotonic()
    progress = Progress()
    for name, inner, seconds in (("load", "gather", 0.2), ("data", "reduce", 0.1), ("save", "gather", 0.1)):
        with progress.phase(name), progress.phase(inner):
            time.sleep(seconds)
    time.sleep(0.1)
    with progress.phase("report"):
        time.sleep(0.1)
        found = progress.get_seconds_by_phase()
    passed = time.monotonic() - began
    assert list(found) == ["start", "load", "save", "steps"], "the host's part of a step is no phase of its own"
    assert found["load"] >= 0.2 and found["save"] >= 0.1 and 0.2 <= found["steps"] <= passed - 0.4
    assert found["start"] > 0


def test_a_rank_that_does_not_come_to_where_the_ranks_meet_is_behind() -> None:
    found = {rank: replace(BEAT, rank=rank, step=0, phase="join", collective=None) for rank in range(3)}
    found[2] = replace(found[2], phase="tokenise")
    assert find_ranks_behind(found, set()) == [2]
    assert "2 other ranks wait for it in join" in describe_hang(found, set()).text


def test_the_sentence_names_rank_host_step_phase_and_who_waits() -> None:
    reported = describe_hang(beats(collective=None, phase="save/gather", step=411), set())
    assert reported.ranks == [1]
    assert reported.text == (
        "the run is hung: rank 1 on n1 (process 100) has made no progress for 11.0 minutes, step 411, phase "
        "save/gather, at step.py:1 train_step; 2 other ranks wait for it in all_reduce"
    )


def test_a_gpu_that_does_not_reach_a_collective_is_reported() -> None:
    reported = describe_hang(beats(device_reached=21), set())
    assert reported.ranks == [1] and "rank 1 on n1" in reported.text
    assert "the GPU is behind" in reported.text and reported.text.endswith("2 other ranks wait for it in all_reduce")


def test_a_network_that_carries_nothing_blames_no_rank() -> None:
    reported = describe_hang(beats(), set())
    assert reported.ranks == [0, 1, 2] and "all 3 ranks are stuck" in reported.text and "doctor" in reported.text


def test_a_silent_process_of_this_host_is_looked_at() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        found = beats(host=get_host_name(), pid=process.pid)
        assert "the process is stopped (SIGSTOP" in describe_hang(found, {1}).text
    finally:
        process.kill()
        process.wait()
    assert "the process has exited" in describe_hang(found, {1}).text
    assert "its host is down" in describe_hang(beats(), {1}).text


def test_a_rank_without_heartbeats_is_behind_and_reported_with_its_host() -> None:
    found = {0: replace(BEAT, rank=0, step=0, phase="join/meet", collective=None)}
    nobody = found | {1: Heartbeat.missing(1), 2: Heartbeat.missing(2)}
    reported = describe_hang(nobody, {1, 2})
    assert reported.ranks == [1, 2]
    assert reported.text == (
        "the run is hung: rank 1 has sent no heartbeat since it was started: it is stopped, or its host is "
        "down; rank 2 has sent no heartbeat since it was started: it is stopped, or its host is down; rank 0 waits "
        "for them in join/meet"
    )


MEETING = """
import sys, time
from pathlib import Path
from trainer.parallel.ranks.group import Ranks
from trainer.parallel.ranks.progress import WAITING_PHASE, phase
from trainer.parallel.ranks.watchdog import Watchdog

watchdog = Watchdog(Ranks(0, 2, 0), Path(sys.argv[1]), 0.01)
watchdog.all_write = sys.argv[2] == "True"
with phase("join"), phase(WAITING_PHASE):
    time.sleep(6.0)
"""


@pytest.mark.parametrize("all_write", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_is_missed_only_where_all_write_from_their_beginning(tmp_path: Path, all_write: bool) -> None:
    """Below torchrun they leave nothing in a folder that another run may be in until rank 0 holds it."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", MEETING, str(tmp_path), str(all_write)], env=env, capture_output=True, text=True
    )
    assert done.returncode == (1 if all_write else 0), done.stderr
    assert (read_hang_report(tmp_path) is not None) == all_write
    assert ("rank 1 has sent no heartbeat" in done.stderr) == all_write


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [143, 0])
def test_a_rank_that_has_ended_is_behind_unless_it_was_done(tmp_path: Path, exit_code: int) -> None:
    """By a signal, say, of which its launcher tells nobody; one that was done waits for nothing."""
    (tmp_path / "heartbeat-1.json").write_bytes(replace(BEAT, rank=1, host="n1", exit_code=exit_code).encode())
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", MEETING, str(tmp_path), "True"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    reported = read_hang_report(tmp_path)
    assert reported is not None and reported.ranks == [1 if exit_code else 0]
    assert ("rank 1 on n1 (process 100)" in reported.text) == bool(exit_code)
    assert ("it has exited with code 143; rank 0 waits for it in join" in reported.text) == bool(exit_code)


def test_a_line_has_always_one_length_and_comes_back() -> None:
    long = replace(BEAT, phase="p" * 80, place="x" * 160, host="h" * 64, exit_code=1)
    for beat in (BEAT, long):
        assert len(beat.encode()) == LINE_BYTES
        assert Heartbeat.parse(beat.encode()) == beat
    assert Heartbeat.parse(BEAT.encode()[:100]) is None


def test_heartbeats_do_not_create_the_folder_and_are_read_by_the_launcher(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    folder = HeartbeatFolder(logs, rank=1, world_size=2)
    folder.publish(BEAT)
    assert not logs.exists(), "a run that is refused leaves nothing behind"
    logs.mkdir()
    folder.publish(replace(BEAT, rank=1, time=time.time()))
    assert folder.read()[1].step == read_heartbeats(logs)[1].step == 412
    HeartbeatFolder(logs, rank=0, world_size=2).publish(replace(BEAT, time=time.time()))
    assert sorted(folder.read()) == [0, 1]
    clear_rank_reports(logs)
    assert list(logs.iterdir()) == []


def test_a_rank_is_known_before_its_first_step_however_soon_that_comes(tmp_path: Path) -> None:
    """Only by its heartbeat does a launcher on another host know whom to tell to stop, and who was killed."""
    logs = tmp_path / "logs"
    watchdog = Watchdog(Ranks(0, 1, 0), logs, hang_timeout_minutes=0.0)
    try:
        watchdog.writes_heartbeats = False
        logs.mkdir()
        PROGRESS.begin_step(1)
        assert read_heartbeats(logs) == {}, "the folder may be another run's"
        watchdog.writes_heartbeats = True
        assert read_heartbeats(logs)[0].pid == os.getpid()
    finally:
        watchdog.end(0)
    clear_rank_reports(logs)
    logs.rmdir()
    watchdog = Watchdog(Ranks(0, 1, 0), logs, hang_timeout_minutes=0.0)
    try:
        logs.mkdir()  # as under torchrun, where the ranks make it themselves
        PROGRESS.begin_step(2)
        assert read_heartbeats(logs)[0].step == 2
    finally:
        watchdog.end(0)


def test_where_somebody_has_emptied_the_folder_a_rank_leaves_its_line_anew(tmp_path: Path) -> None:
    folder = HeartbeatFolder(tmp_path, 1, 2)
    folder.publish(replace(BEAT, rank=1))
    (tmp_path / "heartbeat-1.json").unlink()
    folder.publish(replace(BEAT, rank=1, step=413))
    folder.write_step(414, 400)
    assert read_heartbeats(tmp_path)[1].step == 414


def test_a_rank_that_ends_at_once_leaves_its_exit_code(tmp_path: Path) -> None:
    """In a signal's handler, after which its thread begins no line without it."""
    folder = HeartbeatFolder(tmp_path, 1, 2)
    folder.write_exit_code(143)
    assert read_heartbeats(tmp_path) == {}, "it is not known yet"
    folder.publish(replace(BEAT, rank=1))
    folder.write_exit_code(143)
    folder.publish(replace(BEAT, rank=1))
    assert read_heartbeats(tmp_path)[1].exit_code == 143


def test_one_verdict_is_left_and_an_old_one_does_not_count(tmp_path: Path) -> None:
    old = tmp_path / "hang.json"
    old.write_text('{"ranks": [3], "text": "of yesterday"}')
    os.utime(old, (time.time() - 86400,) * 2)
    first, second = (HeartbeatFolder(tmp_path, rank, 2) for rank in (0, 1))
    assert first.read_report() is None
    assert first.write_report(HangReport([1], "a")) and not second.write_report(HangReport([0], "b"))
    assert second.read_report() == read_hang_report(tmp_path) == HangReport([1], "a")
    old.write_text('{"ranks"')  # half written
    assert second.read_report() is None and not second.write_report(HangReport([0], "b"))


def test_complete_silence_is_noticed_by_the_launcher(tmp_path: Path) -> None:
    folder, observer = HeartbeatFolder(tmp_path, 0, 1), Observer(tmp_path, 1, None, hang_timeout_s=0.1)
    observer._silence_s = 0.0

    def is_silent() -> bool:
        observer._polled_at, observer.silence = 0.0, None
        observer.poll()
        return observer.silence is not None

    assert not is_silent(), "nobody has begun yet"
    folder.publish(BEAT)
    assert not is_silent(), "a heartbeat since the last check"
    assert is_silent()
    folder.publish(replace(BEAT, exit_code=0))
    assert not is_silent(), "it has ended, which is no silence"


def test_work_is_distinguished_from_waiting() -> None:
    """In a process of its own: threads that other tests have left (progress bars, pools) do a little work at times."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
        fresh.submit(_tell_work_from_waiting).result()


def _tell_work_from_waiting() -> None:
    """Look as the watchdog does: from its own thread, so that its own work does not count."""
    with ThreadPoolExecutor(max_workers=1) as watchdog:
        work = watchdog.submit(ActivityDetector).result()

        def has_progressed() -> bool:
            return watchdog.submit(work.has_progressed).result()

        has_progressed()
        for pause in (0.5, *[0.1] * 10):
            time.sleep(pause)
            assert not has_progressed(), "asleep"
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            sum(range(1000))
        assert has_progressed(), "computing"
        time.sleep(0.5)
        has_progressed()
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            while psutil.Process(child.pid).cpu_times().user < 0.3:
                time.sleep(0.01)
            assert has_progressed(), "a child computes, as with dataset.workers"
        finally:
            child.kill()
            child.wait()


def test_phases_nest_and_steps_count() -> None:
    progress = Progress()
    progress.begin_step(5)
    with progress.phase("save"):
        before = progress.changed_at
        with progress.phase("gather"):
            assert progress.phases == ("save", "gather")
        assert progress.phases == ("save",) and progress.changed_at > before
        with progress.phase("save"):
            assert progress.phases == ("save",), "a phase within itself is not named twice"
        assert progress.phases == ("save",)
    assert (progress.phases, progress.step, progress.first_step) == ((), 5, 5)


def test_the_main_threads_place_is_read_from_another_thread() -> None:
    places: list[str | None] = []
    thread = threading.Thread(target=lambda: places.append(find_location(get_main_thread_frame())))
    thread.start()
    thread.join()
    assert places[0] is not None and places[0].startswith("tests/unit/test_watchdog.py:")
    assert find_collective(get_main_thread_frame()) is None


PENDING = """
import os
import sys
import time
os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
import torch
import torch.distributed as dist
from trainer.parallel.ranks.process_state import read_recorded_collectives
dist.init_process_group("gloo")
assert read_recorded_collectives() == (None, None)
value = torch.ones(4)
dist.all_reduce(value)
# The result arrives before gloo's own thread has recorded the end of the collective.
deadline = time.monotonic() + 300
while (finished := read_recorded_collectives()) != (None, 1) and time.monotonic() < deadline:
    time.sleep(0.01)
work = dist.all_reduce(value, async_op=True) if dist.get_rank() == 0 else None
# One write: two ranks share the pipe.
sys.stdout.write(f"{dist.get_rank()} {finished} {read_recorded_collectives()}\\n")
sys.stdout.flush()
# Rank 1 joins in when rank 0 has looked.
store = dist.distributed_c10d._get_default_store()
store.set("looked", "") if dist.get_rank() == 0 else store.wait(["looked"])
work = work or dist.all_reduce(value, async_op=True)
work.wait()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_collective_that_is_under_way_is_named_though_no_stack_shows_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(PENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py")], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert sorted(done.stdout.splitlines()) == ["0 (None, 1) ('all_reduce', 2)", "1 (None, 1) (None, 1)"], done.stderr


def test_free_memory_is_of_this_machine() -> None:
    assert 0.0 < read_free_host_memory() < 4096.0


def test_a_note_and_a_heartbeat_cost_less_than_a_tenth_of_a_millisecond_a_step(tmp_path: Path) -> None:
    """Eight notes are what a step of one micro-batch makes; the thread's beat is paid every quarter of a second."""
    watchdog = Watchdog(Ranks(0, 1, 0), tmp_path, hang_timeout_minutes=0.0)
    try:
        started = time.process_time()
        for _ in range(1000):
            for _ in range(8):
                with PROGRESS.phase("forward"):
                    pass
        notes = (time.process_time() - started) / 1000
        started = time.process_time()
        for _ in range(50):
            watchdog._folder.publish(watchdog._build_heartbeat())
        beat = (time.process_time() - started) / 50
    finally:
        watchdog.end(0)
    assert notes < 1e-4
    # A beat every two seconds, with steps of 20 ms at least: its share of a step.
    assert beat * 0.020 / 2.0 < 1e-4
    assert json.loads((tmp_path / "heartbeat-0.json").read_text().splitlines()[0])["exit_code"] == 0
