"""The faults: what goes wrong, where and in which phases, and the message that must be reported."""

import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import outside as acts
from tests.chaos.disks import Disk, FileServer, SmallDisk
from tests.chaos.outside import Outside
from tests.chaos.places import HERE, Local, OnGpus, Place, ThroughSlurm, ThroughSsh
from tests.chaos.workplace import BATCH, EVALUATE_EVERY, HANG_MINUTES, HELD_OUT_CHATS, Chaos, start
from trainer.config.training_sections import FIRST_STEP_FACTOR

# Calls of the functions that tests/cluster/mischief wraps: two sums a step and one an evaluation, two files a save.
CALL = {
    "tokenise": 1,
    "begin": 1,
    "load": 1,
    "first step": 3,
    "step": 22,
    "data": 14,
    "evaluate": 2,
    "save": 3,
    "end": 1,
}
BEFORE_A_STEP = ("begin", "tokenise", "load", "first step")
# Looking around, asking the hosts, telling: on two cores that other runs share.
MARGIN_S, START_S = 15.0, 60.0
# Losses of one rank: of the held-out micro-batches before training, one a step, those of the evaluation after step 6.
HELD_OUT = HELD_OUT_CHATS // (2 * BATCH)
LOSS_CALL = {
    "first step": HELD_OUT + 1,
    "step": HELD_OUT + 6,
    "evaluate": HELD_OUT + EVALUATE_EVERY + 1,
}
EVERY = ("tokenise", "load", "first step", "step", "evaluate", "save", "end")
CLOCK = Path(__file__).with_name("clock.c")
CPU, GPUS, SSH, SLURM = Local.name, OnGpus.name, ThroughSsh.name, ThroughSlurm.name
FAILED = "the run failed"


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    phases: tuple[str, ...]
    message: str
    """A regular expression that the user's terminal must show, {0} and {1} for the ranks' hosts; empty for nothing."""
    also: str = ""
    """Another one, that must be shown as well."""
    action: str = ""
    """Of tests/cluster/mischief, in the rank itself."""
    in_loss: bool = False
    """Whether it happens to the loss of a micro-batch in that phase."""
    rank: int = 1
    """Where it happens; of what happens outside, who calls for it."""
    blames: bool = False
    """Whether that rank is to blame, and no other may be named."""
    outside: Outside | None = None
    """What is done from outside when the rank calls."""
    disk: type[SmallDisk] | type[FileServer] | None = None
    settings: tuple[str, ...] = ()
    places: tuple[str, ...] = (CPU,)
    clock: bool = False
    """Whether the run sees a clock that can be set."""
    hangs: bool = False
    """Whether only a timeout reports it."""
    reported_by_start: bool = False
    """Whether the start of a run reports it, the next one or another."""
    passes: bool = False
    """Whether a run goes through it undisturbed, so that there can be several in one."""

    def phases_at(self, place: str) -> tuple[str, ...]:
        """Elsewhere no rank has been started while a process of its own tokenises."""
        return tuple(phase for phase in self.phases if place in HERE or phase != "tokenise" or not self.blames)

    def own_disk(self, folder: Path, name: str, place: Place) -> Disk | None:
        """The disk that a run of it lies on, mounted."""
        return None if self.disk is None else self.disk((place.mounts or folder) / name)

    def begin(self, folder: Path, out: Path, phase: str, place: Place, disk: Disk | None) -> Chaos:
        """Start the run in which it happens."""
        where, call = ("step" if phase == "first step" else phase), CALL[phase]
        if self.in_loss:
            where, call = "loss", LOSS_CALL[phase]
        rank = str(self.rank)
        if phase in ("tokenise", "end"):
            rank = "" if phase == "tokenise" and place.name not in HERE else "0"
        settings, variables = self.settings, {}
        if phase == "tokenise":
            settings += (f"dataset.cache_dir={out}-cache",)
        if self.clock:
            variables = clock_variables(folder, out)
        mischief = f"{rank}:{self.action or 'call'}@{where}:{call}"
        return start(folder, out, *settings, mischief=mischief, place=place, disk=disk, **variables)

    def happen(self, run: Chaos) -> float | None:
        """Wait until it happens; when it did, by the clock, or None if it did not."""
        when = run.wait_until_called()
        if self.outside is not None and when is not None:
            self.outside(run)
            run.heard()
        return when

    def detected(self, run: Chaos, when: float) -> float | None:
        """Return the seconds until it was reported; None if never, not fully, or if there is nothing to report."""
        words = self.words(run.place)
        if not re.search(self.also, run.text):
            return None
        for at, line in run.lines:
            if words and at >= when - 1.0 and re.search(words, line):
                return max(0.0, at - when)
        return None

    def limit(self, phase: str) -> float:
        """Return the seconds allowed until the report: a hang by its timeout, which is longer before the first step."""
        hang = 60.0 * HANG_MINUTES * (FIRST_STEP_FACTOR if self.hangs and phase in BEFORE_A_STEP else 1.0)
        return hang + MARGIN_S + (START_S if self.reported_by_start else 0.0)

    def words(self, place: Place) -> str:
        """Return the regular expression of the message that must be reported."""
        first, second = map(re.escape, place.hosts)
        return self.message.replace("{0}", first).replace("{1}", second)

    def misnamed(self, run: Chaos) -> str:
        """The line that blames another rank than that which is to blame; empty if there is none."""
        for _, line in run.lines:
            found = re.search(rf"{FAILED}.*?: rank (\d+) on (\S+)", line)
            if self.blames and found:
                right = (str(self.rank), run.place.hosts[self.rank])
                return "" if found.groups() == right else line.strip()
        return ""


def clock_variables(folder: Path, out: Path) -> dict[str, str]:
    """Return the environment of a run with a shifted clock; the file contains the seconds it is ahead.

    Not libfaketime: with its 0.9.10 time.sleep of Python 3.11 fails (EINVAL).
    """
    library, clock = folder / "clock.so", folder / f"{out.name}.clock"
    if not library.exists():
        building = folder / f"clock-{threading.get_ident()}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", str(CLOCK), "-o", str(building), "-ldl"], check=True)
        building.rename(library)
    clock.write_text("0")
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}


def of_rank(number: int, rest: str = "") -> str:
    return rf"{FAILED}.*: rank {number} on {{{number}}} .*{rest}"


def on_rank(name: str, phases: tuple[str, ...], number: int, words: str, **more: object) -> Fault:
    """A fault that is one rank's."""
    return Fault(name, phases, of_rank(number, words), rank=number, blames=True, hangs=words == HANGS, **more)  # type: ignore[arg-type]


KILLED, RAISED, HANGS = "was killed by signal 9", "exited with code 1", ""
REFUSED = r"second run: exit code 2: error: .*in use by another run"
STOPPING = r"SIGTERM: (saving|stopping)|stopped by SIGTERM"
# A host that cannot be reached before there are ranks is a mistake in the hostfile.
LOST = rf"({FAILED}|error: ).*n2"
ANYWHERE, HOSTS, RANKS_OF_CPU = (CPU, GPUS, SSH, SLURM), (SSH, SLURM), (CPU, SSH, SLURM)
RUNNING = EVERY[1:-1]
FAULTS = (
    *[
        on_rank(f"SIGKILL of rank {number}", EVERY, number, KILLED, outside=acts.kill_rank(number), places=ANYWHERE)
        for number in (1, 0)
    ],
    *[
        on_rank(f"SIGSTOP of rank {number}", EVERY, number, HANGS, outside=acts.stop_rank(number), places=ANYWHERE)
        for number in (1, 0)
    ],
    Fault("SIGKILL of the tokenising process", ("tokenise",), f"{FAILED}.*: process \\d+ on login was killed",
          outside=acts.kill_preparation, places=HOSTS),
    on_rank("exception in rank 1", RUNNING, 1, RAISED, action="raise",
            places=ANYWHERE),
    on_rank("exception in rank 0", EVERY[1:], 0, RAISED, action="raise"),
    on_rank("loader that raises", ("data",), 1, RAISED, action="raise", places=RANKS_OF_CPU),
    on_rank("rank that hangs", RUNNING, 1, HANGS, action="hang",
            places=ANYWHERE),
    on_rank("rank stopped before its first heartbeat", ("begin",), 1, HANGS, action="stop", places=RANKS_OF_CPU),
    on_rank("kernel that never ends", ("first step", "step"), 1, HANGS, action="spin", places=(GPUS,)),
    on_rank("NaN in a loss", ("first step", "step"), 1, RAISED, also="is not finite", action="nan", in_loss=True,
            places=ANYWHERE),
    Fault("NaN in a held-out loss", ("evaluate",), "warning: the held-out loss is nan", action="nan",
          in_loss=True, places=ANYWHERE),
    on_rank("OOM of the host", RUNNING, 1, KILLED, action="eat", outside=acts.starve(1)),
    on_rank("OOM of the host, rank 0", ("tokenise", "end"), 0, KILLED, action="eat", outside=acts.starve(0)),
    on_rank("OOM of a GPU", RUNNING, 1, RAISED, action="exhaust",
            also="out of memory", places=(GPUS,)),
    Fault("SIGKILL of the launcher", EVERY, "", outside=acts.kill_launcher, places=ANYWHERE),
    Fault("SIGSTOP of the launcher for 10 s", EVERY, "", outside=acts.halt_launcher, passes=True, places=ANYWHERE),
    Fault("SIGTERM", EVERY, STOPPING, outside=acts.terminate, places=ANYWHERE),
    Fault("SIGTERM twice at once", EVERY, f"{STOPPING}|stopping at once", outside=acts.terminate_twice_at_once,
          places=ANYWHERE),
    Fault("SIGTERM, and again", EVERY, f"{STOPPING}|stopping at once", outside=acts.terminate_twice, places=ANYWHERE),
    Fault("disk full", EVERY[1:], "No space left on device", rank=0, outside=acts.fill_disk, disk=SmallDisk,
          places=ANYWHERE),
    Fault("disk read-only", EVERY[1:], "Read-only file system", rank=0, outside=acts.protect_disk, disk=SmallDisk,
          places=ANYWHERE),
    Fault("file server mute for 10 s", EVERY[1:], "", outside=acts.halt_file_server, disk=FileServer, passes=True,
          places=RANKS_OF_CPU),
    Fault("file server mute for 45 s", EVERY[1:], "", outside=acts.halt_file_server_for_long, disk=FileServer),
    Fault("file server gone", EVERY[1:], "Transport endpoint is not connected", outside=acts.kill_file_server,
          disk=FileServer, places=RANKS_OF_CPU),
    *[
        Fault(f"checkpoint {what}, rank killed", ("step",), "skipped checkpoint-8",
              outside=acts.damage_checkpoint(how), reported_by_start=True, places=ANYWHERE)
        for what, how in (("with a flipped bit", "flip"), ("cut in half", "cut"), ("that lacks a file", "remove"))
    ],
    Fault("two runs in one folder", EVERY[1:], REFUSED, outside=acts.start_second_run, passes=True,
          reported_by_start=True, settings=("training.hang_timeout=5",), places=ANYWHERE),
    Fault("clock 2 h ahead", EVERY, "", outside=acts.jump(7200), clock=True, passes=True),
    Fault("clock 2 h back", EVERY, "", outside=acts.jump(-7200), clock=True, passes=True),
    Fault("all halted for 35 s", EVERY, "", outside=acts.halt_all),
    Fault("network cut for 10 s", EVERY[1:], "", outside=acts.cut_network(10.0), places=HOSTS, passes=True),
    Fault("SIGKILL of n2's sshd, back after 10 s", EVERY[1:], "", outside=acts.kill_daemon("n2", "sshd_config"),
          places=(SSH,), passes=True),
    Fault("SIGKILL of n2's slurmd, back after 10 s", EVERY[1:], "", outside=acts.kill_daemon("n2", "slurmd -D"),
          places=(SLURM,), passes=True),
    Fault("SIGKILL of slurmctld, back after 10 s", EVERY[1:], "", outside=acts.kill_daemon("login", "slurmctld -D"),
          places=(SLURM,), passes=True),
    # Ranks that are to be started just then are not.
    Fault("SIGKILL of n2's sshd until reported", ("tokenise",), LOST,
          outside=acts.kill_daemon("n2", "sshd_config", until_reported=True), places=(SSH,)),
    Fault("SIGKILL of slurmctld until reported", ("tokenise",), FAILED,
          outside=acts.kill_daemon("login", "slurmctld -D", until_reported=True), places=(SLURM,)),
    # Where all wait for each other there is no host to blame.
    Fault("network cut until reported", EVERY, rf"({FAILED}|error: ).*(n2|the network between them)",
          outside=acts.cut_network(240.0), hangs=True, places=HOSTS),
    Fault("n2 loses its power", EVERY, LOST, outside=acts.switch_off, hangs=True, places=HOSTS),
    Fault("SIGKILL of pdsh", EVERY[1:], f"{FAILED}: the launcher", outside=acts.kill_starter("pdsh"), places=(SSH,)),
    Fault("SIGKILL of srun", EVERY[1:], f"{FAILED}: the launcher", outside=acts.kill_starter("srun"), places=(SLURM,)),
    Fault("SIGKILL of DeepSpeed's launcher on n2", EVERY[1:], f"{FAILED}.*n2",
          outside=acts.kill_on_node("deepspeed.launcher.launch"), places=(SSH,)),
    Fault("SIGKILL of n2's sshd connections", EVERY[1:], f"{FAILED}.*n2",
          outside=acts.kill_on_node("sshd: root"), places=(SSH,)),
    # If the rank there has ended already there is none to blame, and only srun continues.
    Fault("SIGKILL of n2's slurmstepd", EVERY[1:], f"{FAILED}.*n2|their launcher still waits",
          outside=acts.kill_on_node("slurmstepd: ["), places=(SLURM,)),
    Fault("SIGKILL of n2's slurmd until reported", EVERY[:1], f"({FAILED}|lost nodes|srun: error).*n2",
          outside=acts.kill_daemon("n2", "slurmd -D", until_reported=True), places=(SLURM,)),
    # Ranks wait in their calls for longer than a run would let them.
    Fault("SIGKILL of n2's slurmd until reported", EVERY[1:], f"({FAILED}|lost nodes|error: Node failure).*n2",
          outside=acts.kill_daemon("n2", "slurmd -D", until_reported=True, holds=True), places=(SLURM,),
          settings=("training.hang_timeout=5",)),
)  # fmt: skip
