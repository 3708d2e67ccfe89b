"""What is done to a run from outside, at the moment when a rank calls: each function returns once it is done."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.disks import FileServer, SmallDisk
from tests.chaos.places import ThroughSlurm, ThroughSsh
from tests.chaos.workplace import Chaos

Outside = Callable[[Chaos], None]
CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
CGROUP_MB = 64
HALTED_S = 35.0  # longer than `training.hang_timeout`
UNHEARD_S = 10.0
DARK_S = 45.0
GONE_S = 10.0


def kill_rank(number: int) -> Outside:
    """SIGKILL, while it is where it called from."""
    return lambda run: _signal_rank(run, number, signal.SIGKILL)


def stop_rank(number: int) -> Outside:
    """SIGSTOP."""
    return lambda run: _signal_rank(run, number, signal.SIGSTOP)


def _signal_rank(run: Chaos, number: int, what: int) -> None:
    process = run.rank(number)
    if process is not None:
        process.send_signal(what)


def kill_launcher(run: Chaos) -> None:
    run.launcher().kill()
    run.is_killed = True


def kill_preparation(run: Chaos) -> None:
    for process in run.processes("trainer.commands.prepare_run"):
        process.kill()


def halt_launcher(run: Chaos) -> None:
    launcher = run.launcher()
    launcher.suspend()
    run.heard()
    time.sleep(UNHEARD_S)
    launcher.resume()


def terminate(run: Chaos) -> None:
    run.launcher().terminate()


def terminate_twice_at_once(run: Chaos) -> None:
    """Counts as one: `timeout` and some schedulers signal a process and its group."""
    launcher = run.launcher()
    for _ in range(2):
        launcher.terminate()


def terminate_twice(run: Chaos) -> None:
    launcher = run.launcher()
    for _ in range(2):
        with suppress(psutil.NoSuchProcess):
            launcher.terminate()
        time.sleep(1.0)


def fill_disk(run: Chaos) -> None:
    """Fill the disk until the run reports it; then there is room again."""
    disk = run.disk
    assert isinstance(disk, SmallDisk)
    disk.fill()
    run.heard()
    run.wait_until_reported("No space left on device")
    disk.empty()


def protect_disk(run: Chaos) -> None:
    """Break it until the run reports it; then repair it."""
    disk = run.disk
    assert isinstance(disk, SmallDisk)
    disk.protect()
    run.heard()
    run.wait_until_reported("Read-only file system")
    disk.repair()


def halt_file_server(run: Chaos) -> None:
    disk = run.disk
    assert isinstance(disk, FileServer)
    disk.halt()
    run.heard()
    time.sleep(UNHEARD_S)
    disk.start_server()


def halt_file_server_for_long(run: Chaos) -> None:
    disk = run.disk
    assert isinstance(disk, FileServer)
    disk.halt()
    run.heard()
    time.sleep(DARK_S)
    disk.start_server()


def kill_file_server(run: Chaos) -> None:
    """Unmount it, and mount it again GONE_S after the run reports it."""
    disk = run.disk
    assert isinstance(disk, FileServer)
    disk.kill()
    run.heard()
    run.wait_until_reported("Transport endpoint is not connected")
    time.sleep(GONE_S)
    disk.mount_again()


def damage_checkpoint(how: str) -> Outside:
    """Of the newest checkpoint, with a rank killed afterwards: `flip` a bit, `cut` a file in half, `remove` it."""

    def act(run: Chaos) -> None:
        newest = run.out / "checkpoint-8"
        run.wait_for((newest / "COMPLETE").exists)
        file = newest / "training_state-00001.safetensors"
        content = bytearray(file.read_bytes())
        if how == "flip":
            content[len(content) // 2] ^= 1
        file.unlink()
        if how != "remove":
            file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
        _signal_rank(run, 1, signal.SIGKILL)

    return act


def start_second_run(run: Chaos) -> None:
    command = [sys.executable, "-m", "launcher.cli", "train", str(run.folder / "config.yaml"), f"output_dir={run.out}"]
    command = run.place.command(command)
    env = run.place.environment()
    second = subprocess.run(command, cwd=run.folder, env=env, capture_output=True, text=True, timeout=300)
    run.lines.append((time.time(), f"second run: exit code {second.returncode}: {second.stderr}"))


def jump(seconds: int) -> Outside:
    """Of the clock that all of the run sees."""

    def act(run: Chaos) -> None:
        (run.folder / f"{run.out.name}.clock").write_text(str(seconds))
        time.sleep(3.0)

    return act


def halt_all(run: Chaos) -> None:
    """Suspend and resume everything, as a laptop's lid or a hypervisor does."""
    below = psutil.Process(run.process.pid).children(recursive=True)
    for process in below:
        with suppress(psutil.NoSuchProcess):  # one that has just ended
            process.suspend()
    time.sleep(HALTED_S)
    for process in below:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def starve(number: int) -> Outside:
    """A rank goes into a memory cgroup in which it gets CGROUP_MB more; then it eats."""

    def act(run: Chaos) -> None:
        group, process = _small_group(f"zerolora-chaos-{os.getpid()}-{time.monotonic_ns()}"), run.rank(number)
        assert process is not None
        (group / "cgroup.procs").write_text(str(process.pid))
        run.heard()
        run.wait_for(lambda: not (group / "cgroup.procs").read_text())
        with suppress(OSError):
            group.rmdir()

    return act


def _small_group(name: str) -> Path:
    for root, limit in CGROUPS:
        group = Path(root) / name
        with suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(CGROUP_MB * 2**20))
            return group
    raise RuntimeError("no memory cgroup can be made")


def kill_on_node(words: str) -> Outside:
    """Send SIGKILL to the processes of node n2 with the words in their command lines."""

    def act(run: Chaos) -> None:
        _kill_on(run, "n2", words)

    return act


def _kill_on(run: Chaos, host: str, words: str) -> None:
    assert isinstance(run.place, ThroughSsh | ThroughSlurm)
    for process in run.place.network.processes(host):
        with suppress(psutil.Error):
            if words in " ".join(process.cmdline()):
                process.kill()


def kill_starter(name: str) -> Outside:
    """SIGKILL to the program that starts the ranks elsewhere."""

    def act(run: Chaos) -> None:
        for process in psutil.Process(run.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith(name):  # pdsh is pdsh.bin with Debian
                    process.kill()

    return act


def kill_daemon(host: str, words: str, *, until_reported: bool = False, holds: bool = False) -> Outside:
    """Send SIGKILL to a daemon only; restart it UNHEARD_S later, or once the run has reported it."""

    def act(run: Chaos) -> None:
        assert isinstance(run.place, ThroughSsh | ThroughSlurm)
        _kill_on(run, host, words)
        if not holds:
            run.heard()
        if until_reported:
            run.wait_for(lambda: _has_reported(run), 180.0)
        else:
            time.sleep(UNHEARD_S)
        run.place.repair(host)

    return act


def cut_network(seconds: float) -> Outside:
    """Pull the cable of n2, and put it in again."""

    def act(run: Chaos) -> None:
        assert isinstance(run.place, ThroughSsh | ThroughSlurm)
        run.place.network.plug("n2", "down")
        run.heard()
        run.wait_for(lambda: _has_reported(run), seconds)
        run.place.network.plug("n2", "up")

    return act


def switch_off(run: Chaos) -> None:
    """Cut the power of node n2 until the run reports it."""
    assert isinstance(run.place, ThroughSsh | ThroughSlurm)
    run.place.network.switch_off("n2")
    run.heard()
    run.wait_for(lambda: _has_reported(run), 240.0)
    run.place.repair("n2")


def _has_reported(run: Chaos) -> bool:
    return "the run failed" in run.text or "error: " in run.text
