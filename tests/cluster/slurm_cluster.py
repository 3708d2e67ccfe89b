"""A SLURM cluster of its own: munged, slurmctld on `login` and a slurmd on each node, all in one folder."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.hosts import LOGIN, Hosts

# cred_expire: the life of a credential, for which a job that was queued again waits; two minutes otherwise. Longer
# than KillWait, for what is left of the first start is ended by the job's number, which the second has too.
CONTROLLER_CONFIG = """\
ClusterName=tests
SlurmctldHost={login}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
AccountingStorageType=accounting_storage/none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=15
KillWait=15
MinJobAge=600
"""
PARTITIONS = {
    "all": "Default=YES PreemptMode=OFF",
    "low": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=90",
    "low-cancel": "PriorityTier=1 PreemptMode=CANCEL GraceTime=90",
    "high": "PriorityTier=10 PreemptMode=OFF",
}
PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]


class SlurmCluster:
    """The daemons, and the commands a user has."""

    def __init__(self, hosts: Hosts, folder: Path, env: Mapping[str, str], *, cpus: int = 4) -> None:
        self.hosts, self.folder, self._env = hosts, folder, env
        self.nodes = hosts.names[1:]
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        self._config = folder / "slurm.conf"
        lines = [CONTROLLER_CONFIG.format(login=LOGIN, address=hosts.address[LOGIN], folder=folder)]
        lines += [
            f"NodeName={node} NodeHostname={node} NodeAddr={hosts.address[node]} CPUs={cpus} Gres=gpu:{cpus}\n"
            for node in self.nodes
        ]
        lines += [
            f"PartitionName={name} Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP {options}\n"
            for name, options in PARTITIONS.items()
        ]
        self._config.write_text("".join(lines))
        # GPUs to ask for: SLURM wants device files, and numbers them by their names.
        for number in range(cpus):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{cpus - 1}]\n")
        self._start_munge()
        self.start_controller()
        for node in self.nodes:
            self.switch_on(node)
        self.wait_for_nodes()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._daemon(LOGIN, ["munged", "--foreground", "--force", f"--key-file={key}", *options])
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < deadline, (self.folder / "munged.out").read_text()
            time.sleep(0.1)

    def _daemon(self, host: str, command: Sequence[str]) -> subprocess.Popen[str]:
        with open(self.folder / f"{Path(command[0]).name}.out", "a") as log:
            return self.hosts.start(
                host, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start_controller(self) -> None:
        """Start slurmctld, which has ended."""
        self._controller = self._daemon(LOGIN, ["slurmctld", "-D", "-f", str(self._config)])

    def switch_on(self, node: str) -> None:
        """Start a node's slurmd."""
        self.hosts.plug(node, "up")
        self._daemon(node, ["slurmd", "-D", "-N", node, "-f", str(self._config)])

    def switch_off(self, node: str) -> None:
        """End a node's slurmd and everything it runs, at once, and cut its connections."""
        self.hosts.switch_off(node)

    def kill_processes(self, node: str, *names: str) -> None:
        """SIGKILL to a node's slurmd, slurmstepd and ranks, or to those named, while its kernel closes connections."""
        for process in self.hosts.processes(node):
            if not names or process.name() in names:
                process.kill()

    def environment(self) -> dict[str, str]:
        """What a shell on the cluster holds."""
        return {**self._env, "SLURM_CONF": str(self._config)}

    def run(self, *command: str, host: str = LOGIN, timeout: float = 120, check: bool = True) -> str:
        """Run a command on a host of the cluster and return what it printed."""
        done = self.hosts.run(host, command, env=self.environment(), timeout=timeout, cwd=ROOT)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_nodes(self) -> None:
        """Return when every node takes jobs."""
        deadline = time.monotonic() + PATIENCE_S
        states: list[str] = []
        while time.monotonic() < deadline:
            states = self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%T", check=False).split()
            if states == ["idle"] * len(self.nodes):
                return
            time.sleep(0.5)
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))
        raise AssertionError(f"nodes are {states}\n{logs}")

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, of the newest task where there are several."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED..."""
        return self.field(job, "JobState")

    def restarts(self, job: str) -> int:
        """How often the job was queued again."""
        return int(self.field(job, "Restarts"))

    def hold(self, job: str, seconds: int) -> None:
        """Let a job that waits be started no sooner than so many seconds from now."""
        self.run("scontrol", "update", f"JobId={job}", f"StartTime=now+{seconds}")

    def reconfigure(self, old: str, new: str) -> None:
        """Change the configuration and restart slurmctld, which reads some of it only at start. Jobs continue."""
        text = self._config.read_text()
        assert old in text
        self._config.write_text(text.replace(old, new))
        self.run("scontrol", "shutdown", "slurmctld")
        self._controller.wait(timeout=PATIENCE_S)
        self.start_controller()
        self.wait_for_nodes()
