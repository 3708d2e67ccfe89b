"""Disks that a run's folder lies on, and what goes wrong with them; mounting needs root."""

import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

SIZE_MB = 1200  # a run asks for 1 GiB before it begins
PATIENCE_S = 20.0


class Disk(Protocol):
    """A mounted folder."""

    folder: Path

    def close(self) -> None:
        """Unmount it, and remove what was on it."""


def share(folder: Path) -> None:
    """Make it one in which hosts see what is mounted later; before they are started."""
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "--make-shared", str(folder)], check=True)


def unmount(folder: Path) -> None:
    """Also where files are open."""
    subprocess.run(["umount", "-l", str(folder)], check=False)


class SmallDisk:
    """A disk of SIZE_MB in memory that can be filled, or no longer be written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)], check=True)

    def fill(self) -> None:
        """To the last byte."""
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while file.write(b"x" * size) == size:
                        pass

    def empty(self) -> None:
        """There is room again."""
        (self.folder / "ballast").unlink()

    def protect(self) -> None:
        """Read-only for everything that is opened from now on, as when a file system finds an error."""
        # Hosts are shown the mount as it is then, and not what is changed of it later.
        view = self.folder.with_name(f"{self.folder.name}-view")
        view.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", str(self.folder), str(view)], check=True)
        subprocess.run(["mount", "--make-private", str(view)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        subprocess.run(["mount", "--bind", str(view), str(self.folder)], check=True)
        unmount(view)
        view.rmdir()

    def repair(self) -> None:
        """It can be written to again."""
        unmount(self.folder)

    def close(self) -> None:
        unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


class FileServer:
    """A folder that a process in user space serves (FUSE), in place of a file server in the network."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._content = folder, folder.with_name(f"{folder.name}-content")
        for path in (folder, self._content):
            path.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        command = ["bindfs", "-f", "-o", "attr_timeout=1,entry_timeout=1", str(self._content), str(self.folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while str(self.folder) not in Path("/proc/mounts").read_text():
            assert self._process.poll() is None and time.monotonic() < deadline, "bindfs does not serve"
            time.sleep(0.05)

    def halt(self) -> None:
        """It answers no more: whoever asks waits."""
        self._process.send_signal(signal.SIGSTOP)

    def start_server(self) -> None:
        """It answers what it was asked."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Unmount: every access fails."""
        self._process.kill()
        self._process.wait()

    def mount_again(self) -> None:
        """As an administrator does it."""
        unmount(self.folder)
        self._start()

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        unmount(self.folder)
        for path in (self.folder, self._content):
            shutil.rmtree(path, ignore_errors=True)
