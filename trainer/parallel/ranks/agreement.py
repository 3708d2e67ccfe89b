"""Check that all ranks run the same code, configuration and versions before they form the process group.

Rank 0 collects the ranks' reports through the key-value store that the process group will use, and sends the result to
all ranks. A collective would not work: a rank without a GPU would form a gloo group while the other ranks wait in NCCL.
"""

import hashlib
import itertools
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainer.config import UserError
from trainer.contract.folder_lock import can_see_lock
from trainer.contract.home import CHECKOUT
from trainer.contract.known_versions import get_installed_version, read_package_versions
from trainer.contract.rendezvous import get_host_name
from trainer.parallel.ranks.group import Ranks, explain_taken_port, set_rendezvous_variables
from trainer.parallel.ranks.progress import WAITING_PHASE, phase

PACKAGES = ("trainer", "ops")
FIXES = {
    "code": "use one checkout on a shared file system, or check out the same commit on all hosts",
    "configuration": "give every rank the same file and settings",
    "device": "run `zerolora doctor` on the host that differs",
}


@dataclass(frozen=True)
class RankReport:
    rank: int
    host: str
    device: str
    """Kind of device, such as `cuda NVIDIA H200` or `cpu`."""
    device_id: str
    """Unique ID of a GPU; empty for a CPU, which ranks may share."""
    values: dict[str, str]
    """Versions and digests by name, which must be equal on all ranks."""
    sees_folder: bool = True
    """Whether this rank can read what rank 0 writes into the output folder."""


_WORLD_IDS, _DECISION_IDS = itertools.count(), itertools.count()
# Keeps rank 0's store server alive, because all ranks use the store again later.
_SERVERS: list[Any] = []
Decision = TypeVar("Decision")


@dataclass(frozen=True)
class World:
    summary: str
    """One-line summary of ranks, hosts, devices and versions."""
    store: Any
    """Store for forming the process group; rank 0 serves it, so keep a reference until the group exists."""
    hosts: int = 1


def check_ranks_agree(ranks: Ranks, settings: str, run_dir: Path, timeout_minutes: float, token: str = "") -> World:
    """Check that all ranks agree; every rank must call this before the process group is formed.

    `settings` is the configuration as JSON. `token` identifies the lock that rank 0 holds in `run_dir`. A rank that
    does not see this lock does not share the folder; an empty token skips this check. Raises UserError on every rank,
    naming the hosts that differ, and TimeoutError on rank 0 if a rank does not arrive within `timeout_minutes`.
    """
    report = build_report(ranks, settings)
    if ranks.world_size == 1:
        return World(format_summary([report]), None)
    with phase(WAITING_PHASE):
        set_rendezvous_variables(ranks)  # under mpirun the ranks wait for each other here
        timeout = timedelta(minutes=timeout_minutes)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
        except dist.DistNetworkError as error:
            raise explain_taken_port(error) from None
        # An earlier run of these processes may have left values in the store.
        exchange = PrefixStore(f"zerolora_world_{next(_WORLD_IDS)}", store)
        exchange.set_timeout(timeout)
        if ranks.is_main:
            exchange.set("folder", token)
        token = exchange.get("folder").decode()
        report = replace(report, sees_folder=ranks.is_main or not token or can_see_lock(run_dir, token))
        answer = _exchange_reports(exchange, ranks, report, timeout, str(run_dir))
    if answer["wrong"]:
        raise UserError(answer["wrong"])
    return World(answer["summary"], store, int(answer["hosts"]))


def decide_on_rank_0(ranks: Ranks, timeout_minutes: float, decide: Callable[[], Decision]) -> Decision | None:
    """Return the result of `decide` on rank 0, and None on the other ranks.

    Every rank must call this before the process group is formed. A UserError from `decide` is raised on all ranks,
    after all have received it.
    """
    if ranks.world_size == 1:
        return decide()
    set_rendezvous_variables(ranks)
    timeout = timedelta(minutes=timeout_minutes)
    server, _, _ = next(rendezvous("env://", timeout=timeout))
    store: Any = PrefixStore(f"zerolora_decision_{next(_DECISION_IDS)}", server)
    store.set_timeout(timeout)
    _SERVERS.append(server)
    decision, problem = None, ""
    if ranks.is_main:
        try:
            decision = decide()
        except UserError as error:
            problem = str(error)
    with phase(WAITING_PHASE):
        problem = _send_to_all(store, ranks, problem)
    if problem:
        raise UserError(problem)
    return decision


def build_report(ranks: Ranks, settings: str) -> RankReport:
    device, device_id = "cpu", ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(ranks.device())
        device, device_id = f"cuda {properties.name}", str(properties.uuid)
    values = {"python": platform.python_version()} | read_package_versions()
    values["cuda"] = str(torch.version.cuda)
    values["code"] = compute_code_version()
    values["configuration"] = hashlib.sha256(settings.encode()).hexdigest()[:12]
    return RankReport(ranks.rank, get_host_name(), device, device_id, values)


@cache
def compute_code_version() -> str:
    """Return the package's version and a digest of the sources, independent of version control."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            digest.update(str(path.relative_to(CHECKOUT)).encode() + b"\0" + path.read_bytes())
    return f"{get_installed_version('zerolora') or 'checkout'}+{digest.hexdigest()[:12]}"


def find_differences(reports: Sequence[RankReport]) -> list[tuple[str, str]]:
    """Return (problem, fix) for each difference between ranks; the problem names the hosts."""
    found = []
    names = dict.fromkeys(name for report in reports for name in report.values)
    for name in ("device", *names):
        hosts: dict[str, list[str]] = defaultdict(list)
        # Compare one rank per host: if a file is saved while the ranks of a host read it, their digests differ.
        first_of_host = {report.host: report for report in reversed(reports)}
        compared = [report for report in reports if name != "code" or first_of_host[report.host] is report]
        for report in compared:
            value = report.device if name == "device" else report.values.get(name, "not installed")
            hosts[value].append(report.host)
        if len(hosts) > 1:
            ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))
            values = "; ".join(f"{value} on {_join_names(dict.fromkeys(where))}" for value, where in ordered)
            fix = FIXES.get(name, f"install one version of {name} on all hosts")
            found.append((f"{name} differs: {values}", fix))
    return found + _find_shared_devices(reports)


def check_shared_folder(reports: Sequence[RankReport], output_dir: str) -> list[str]:
    """Return a list with one error if some hosts cannot see rank 0's output folder, else an empty list."""
    hosts = dict.fromkeys(report.host for report in reports if not report.sees_folder)
    if not hosts:
        return []
    return [
        f"output_dir={output_dir}: files that rank 0 on {reports[0].host} writes there are not visible on "
        f"{_join_names(hosts)}; use a folder on a file system that all hosts share"
    ]


def _find_shared_devices(reports: Sequence[RankReport]) -> list[tuple[str, str]]:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for report in reports:
        if report.device_id:
            users[report.host, report.device_id].append(report.rank)
    return [
        (f"ranks {_join_names(map(str, ranks))} on {host} use the same GPU", "start one rank per GPU")
        for (host, _), ranks in users.items()
        if len(ranks) > 1
    ]


def format_summary(reports: Sequence[RankReport]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    values = reports[0].values
    versions = ", ".join(f"{name} {values[name]}" for name in ("torch", "deepspeed") if name in values)
    rank_word = "rank" if len(reports) == 1 else "ranks"
    return f"world        {len(reports)} {rank_word} on {_join_names(hosts)}: {reports[0].device}; {versions}"


def _exchange_reports(
    store: Any, ranks: Ranks, report: RankReport, timeout: timedelta, output_dir: str
) -> dict[str, str]:
    if not ranks.is_main:
        store.set(f"report-{ranks.rank}", json.dumps(asdict(report)))
        return json.loads(_send_to_all(store, ranks, ""))
    reports = [report]
    for rank in range(1, ranks.world_size):
        try:
            reports.append(RankReport(**json.loads(store.get(f"report-{rank}"))))
        except dist.DistStoreError:
            raise TimeoutError(
                f"rank {rank} did not join within {timeout}; ranks joined from these hosts: "
                f"{_join_names(dict.fromkeys(report.host for report in reports))}"
            ) from None
    answer = {
        "wrong": "\n".join([*map("; ".join, find_differences(reports)), *check_shared_folder(reports, output_dir)]),
        "summary": format_summary(reports),
        "hosts": str(len({report.host for report in reports})),
    }
    _send_to_all(store, ranks, json.dumps(answer))
    return answer


def _send_to_all(store: Any, ranks: Ranks, text: str) -> str:
    """Return rank 0's `text` on every rank after all have read it, because the store closes when rank 0 exits."""
    if ranks.is_main:
        store.set("answer", text)
    else:
        text = store.get("answer").decode()
        if store.add("read", 1) == ranks.world_size - 1:
            store.set("all read", "")
    store.wait(["all read"])
    return text


def _join_names(names: Iterable[str]) -> str:
    """Join names with commas; if there are more than eight, only the first four and the last."""
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 8 else f"{', '.join(listed[:4])}, ... {listed[-1]} ({len(listed)})"
