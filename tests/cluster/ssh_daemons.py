"""Hosts that let this user in by ssh."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import LOGIN, Hosts

SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CLIENT = """\
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
PATIENCE_S = 120.0


@contextmanager
def ssh_daemons(
    hosts: Hosts, nodes: Sequence[str], folder: Path, env: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """An sshd on each node while the block lasts; `env` with an `ssh` that is let in."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemons = [start_sshd(hosts, node, folder) for node in nodes]
    env = {**env, "PATH": f"{folder}/bin:{env['PATH']}"}
    try:
        deadline = time.monotonic() + PATIENCE_S
        while any(hosts.run(LOGIN, ["ssh", node, "true"], env=env).returncode for node in nodes):
            assert time.monotonic() < deadline, "no sshd"
            time.sleep(0.1)
        yield env
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def start_sshd(hosts: Hosts, node: str, folder: Path) -> subprocess.Popen[str]:
    """The daemon of one host."""
    command = ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config")]
    return hosts.start(node, command, stdin=subprocess.DEVNULL)
