"""What it takes to start a run on two SLURM nodes: srun for every rank against srun of DeepSpeed's launcher per node.

python -m tests.bench.slurm_start [RUNS]      as root, with Debian's slurm-wlm and munge
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.conftest import ROOT, environment
from tests.cluster.hosts import LOGIN, Hosts
from tests.cluster.slurm_cluster import SlurmCluster
from tests.ends import write_endless_run

TIMED = "TIMEFORMAT='time %U %S'; time ( {command} > {log}-$SLURM_NODEID.log 2>&1 )"
FIRST_PORT = 20_000


def commands(folder: Path, run: str, port: int) -> dict[str, str]:
    """The two ways to start one rank on each node."""
    arguments = f"{folder}/config.yaml output_dir={folder}/{run} training.max_steps=1 --world-size=2"
    deepspeed = f"deepspeed --hostfile={folder}/hosts --no_ssh --node_rank=$SLURM_NODEID --master_addr=n1"
    return {
        "srun": f"python -u -m trainer.train {arguments}",
        "deepspeed": f"{deepspeed} --master_port={port} --module trainer.train {arguments}",
    }


def measure(cluster: SlurmCluster, folder: Path, runs: int) -> dict[str, list[tuple[float, list[float]]]]:
    """Seconds that each run took, and its nodes' processor seconds; by turns, without the first run of each way."""
    found: dict[str, list[tuple[float, list[float]]]] = {"srun": [], "deepspeed": []}
    for number in range(runs + 1):
        for place, way in enumerate(found):
            run, port = f"{way}-{number}", FIRST_PORT + 2 * number + place
            timed = TIMED.format(command=commands(folder, run, port)[way], log=folder / run)
            step = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--mpi=none", "bash", "-c", timed]
            env = cluster.environment() | ({"MASTER_PORT": str(port)} if way == "srun" else {})
            begin = time.monotonic()
            done = cluster.hosts.run(LOGIN, step, env=env, cwd=ROOT)
            elapsed = time.monotonic() - begin
            if not (folder / run / "metrics.jsonl").exists():
                raise SystemExit(f"{run} did not train: {done.stderr}\n{(folder / f'{run}-0.log').read_text()}")
            lines = [line.split() for line in (done.stdout + done.stderr).splitlines() if line.startswith("time ")]
            if number:
                found[way].append((elapsed, [float(user) + float(system) for _, user, system in lines]))
    return found


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):5.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("hosts-files", "slurm"):
            (folder / part).mkdir()
        write_endless_run(folder)
        (folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
        hosts = Hosts(["n1", "n2"], folder / "hosts-files")
        try:
            cluster = SlurmCluster(hosts, folder / "slurm", environment())
            prepare = [
                sys.executable,
                "-m",
                "trainer.commands.prepare_run",
                str(folder / "config.yaml"),
                f"output_dir={folder}/run",
            ]
            subprocess.run(prepare, env=environment(), cwd=ROOT, check=True, capture_output=True)
            found = measure(cluster, folder, runs)
        finally:
            hosts.close()
    for way, results in found.items():
        elapsed, processor = [one for one, _ in results], [one for _, nodes in results for one in nodes]
        print(f"{way:<10} elapsed {summary(elapsed)}   processor of a node {summary(processor)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
