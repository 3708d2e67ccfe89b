"""Where the ranks of a run are: cores or GPUs of this machine, two hosts behind ssh, two nodes of a SLURM cluster."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from tests.chaos.disks import share, unmount
from tests.cluster.conftest import environment as environment_of_hosts
from tests.cluster.hosts import LOGIN, Hosts, needs_root
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.ssh_daemons import ssh_daemons, start_sshd
from tests.distributed.conftest import environment
from tests.ends import HOST

NODES = ("n1", "n2")
# A step that is asked for before the nodes have registered with a new slurmctld is refused.
REGISTERED_S = 8.0
SALLOC = ("salloc", "--quiet", "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1")


class Place(Protocol):
    """Where rank 0 and rank 1 are started."""

    name: str
    hosts: Sequence[str]
    """Of each rank."""
    mounts: Path | None
    """The folder for disks of a case, where hosts are to see them too."""

    def command(self, train: Sequence[str]) -> list[str]:
        """The command line that starts a run there."""

    def environment(self) -> dict[str, str]:
        """Of the shell in which it is typed."""


class Local:
    """Two ranks of this machine."""

    name = "this machine"
    hosts: Sequence[str] = (HOST, HOST)
    mounts: Path | None = None

    def command(self, train: Sequence[str]) -> list[str]:
        return list(train)

    def environment(self) -> dict[str, str]:
        return environment()


class OnGpus(Local):
    """Two ranks of this machine, each on a GPU; they meet by NCCL."""

    name = "two GPUs"

    def environment(self) -> dict[str, str]:
        """Without what makes CPU ranks of them."""
        found = environment()
        del found["DS_ACCELERATOR"]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [found["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
        return found


class ThroughSsh:
    """A rank on each of two hosts, started from a third by pdsh."""

    name = "ssh"
    hosts: Sequence[str] = NODES

    def __init__(self, network: Hosts, env: Mapping[str, str], hostfile: Path, mounts: Path) -> None:
        self.network, self._env, self._hostfile = network, env, hostfile
        self.mounts: Path | None = mounts

    def command(self, train: Sequence[str]) -> list[str]:
        return self.network.inside(LOGIN, [*train, "--hostfile", str(self._hostfile)])

    def environment(self) -> dict[str, str]:
        return dict(self._env)

    def repair(self, host: str) -> None:
        """A node that lost its power, or its daemon, is back."""
        self.network.plug(host, "up")
        start_sshd(self.network, host, self._hostfile.parent)


class ThroughSlurm:
    """A rank on each of two nodes, in an allocation of a login host."""

    name = "SLURM"
    hosts: Sequence[str] = NODES

    def __init__(self, cluster: SlurmCluster, mounts: Path) -> None:
        self.network, self.cluster = cluster.hosts, cluster
        self.mounts: Path | None = mounts

    def command(self, train: Sequence[str]) -> list[str]:
        return self.network.inside(LOGIN, [*SALLOC, *train])

    def environment(self) -> dict[str, str]:
        return self.cluster.environment()

    def repair(self, host: str) -> None:
        """A node that lost its power, or its daemon, is back; the next `salloc` waits until SLURM has seen it."""
        if host == LOGIN:
            self.cluster.start_controller()
            time.sleep(REGISTERED_S)
        else:
            self.cluster.switch_on(host)


def open_place(name: str, stack: ExitStack) -> Place:
    """The place of that name; hosts and daemons end with the stack."""
    if name in HERE:
        return Local() if name == Local.name else OnGpus()
    needs_root("bindfs")
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{os.getpid()}-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    mounts = folder / "mounts"
    share(mounts)
    stack.callback(unmount, mounts)
    network = Hosts(NODES, folder)
    stack.callback(network.close)
    if name == ThroughSlurm.name:
        return ThroughSlurm(SlurmCluster(network, folder, environment_of_hosts()), mounts)
    (folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    env = stack.enter_context(ssh_daemons(network, NODES, folder, environment_of_hosts()))
    return ThroughSsh(network, env, folder / "hostfile", mounts)


HERE = (Local.name, OnGpus.name)
"""Places on one machine, with cases that may run in parallel."""
PLACES = (*HERE, ThroughSsh.name, ThroughSlurm.name)
