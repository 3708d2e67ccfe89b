"""Checks run by `zerolora doctor` across all ranks: versions, clocks, folders, all-reduce.

`zerolora doctor` runs them with the configured launcher: `-m trainer.commands.doctor.ranks [CONFIG] [key=value ...]`.
Rank 0 prints one line of JSON after RESULT_PREFIX.
"""

import argparse
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.config import DatasetSection, RunConfig, UserError, load_config
from trainer.config.errors import format_count
from trainer.contract.json_records import RESULT_PREFIX, CheckResult, CheckState
from trainer.contract.rendezvous import get_host_name
from trainer.parallel.ranks.agreement import RankReport, build_report, find_differences
from trainer.parallel.ranks.group import (
    Ranks,
    exit_process,
    form_process_group,
    gather_objects,
    leave_process_group,
    list_shard_groups,
    wait_for_device,
)

TIMEOUT_MINUTES = 2.0
CHECKED_ELEMENTS = 1_000_003
SIZES = (2**20, 2**24, 2**26)
"""Sizes of the measured all-reduces in bytes; CPUs stop at 16 MiB."""
REPEATS = 5
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 60.0
# Used if no configuration is passed.
PLACEHOLDER_CONFIG = RunConfig(base_model="none", output_dir="none", dataset=DatasetSection(path="none"))
# The bandwidth in GB/s of 1 Gbit Ethernet, the slowest reasonable network for training.
SLOW_GB_PER_S = 0.1


def check_all_reduce(device: torch.device) -> Iterator[CheckResult]:
    """Check that an all-reduce of rank-dependent integers is exact in fp32, then measure its bandwidth."""
    rank, world = dist.get_rank(), dist.get_world_size()
    index = torch.arange(CHECKED_ELEMENTS, device=device) % 1000
    values = (index + 1000 * rank).float()
    dist.all_reduce(values)
    expected = (world * index + 1000 * (world * (world - 1) // 2)).float()
    wrong = torch.tensor([int((values != expected).sum())], device=device)
    dist.all_reduce(wrong)
    backend = dist.get_backend()
    fix = "set NCCL_DEBUG=INFO to see the links used; find the faulty one with NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1"
    if int(wrong):
        found = f"{backend}: {int(wrong)} of {world * CHECKED_ELEMENTS} sums are wrong"
        yield CheckResult("all-reduce", "FAIL", found, fix)
        return
    found = f"{backend}: {CHECKED_ELEMENTS:,} sums over {format_count(world, 'rank')} are exact"
    yield CheckResult("all-reduce", "OK", found)
    if world == 1:
        return
    speeds = [(size, _measure_bus_bandwidth(size, device)) for size in SIZES if device.type == "cuda" or size <= 2**24]
    found = "bus bandwidth " + ", ".join(f"{speed:.2f} GB/s at {size >> 20} MiB" for size, speed in speeds)
    if speeds[-1][1] < SLOW_GB_PER_S:
        yield CheckResult("all-reduce speed", "WARN", found, "set NCCL_SOCKET_IFNAME to the fast network interface")
    else:
        yield CheckResult("all-reduce speed", "OK", found)


def _measure_bus_bandwidth(size: int, device: torch.device) -> float:
    """Return the slowest rank's bus bandwidth in GB/s: 2 (n - 1) / n * bytes / seconds / 1e9 for n ranks."""
    values = torch.zeros(size // 4, device=device)
    dist.all_reduce(values)
    wait_for_device()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(values)
    wait_for_device()
    seconds = torch.tensor([(time.perf_counter() - started) / REPEATS], device=device, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    world = dist.get_world_size()
    return 2 * (world - 1) / world * size / float(seconds) / 1e9


def check_clocks() -> Iterator[CheckResult]:
    """Check how much the hosts' clocks differ, to within the precision of a barrier."""
    dist.barrier()
    times = gather_objects((get_host_name(), time.time()))
    offsets = {host: moment - times[0][1] for host, moment in times}
    host = max(offsets, key=lambda name: abs(offsets[name]))
    difference = max(offsets.values()) - min(offsets.values())
    most_off = f", mostly because of {host}" if difference > CLOCK_WARN_S else ""
    found = f"the hosts' clocks are {difference:.2f} s apart{most_off}"
    if len(offsets) == 1:
        found = f"one host, {host}"
    if difference > CLOCK_WARN_S:
        state: CheckState = "FAIL" if difference > CLOCK_FAIL_S else "WARN"
        yield CheckResult("clocks", state, found, f"synchronize {host} with an NTP server (chronyd)")
    else:
        yield CheckResult("clocks", "OK", found)


def check_output_is_shared(config: RunConfig, ranks: Ranks) -> CheckResult:
    """Check that all hosts share the output folder: rank 0 creates a file that the others look for."""
    path = Path(config.output_dir).absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    file = folder / f".zerolora-doctor-{gather_objects(secrets.token_hex(8))[0]}"
    error = ""
    if ranks.is_main:
        try:
            file.touch()
        except OSError as failure:
            error = failure.strerror or str(failure)
    dist.barrier()
    reports = gather_objects((get_host_name(), _is_listed(file), error))
    if ranks.is_main:
        file.unlink(missing_ok=True)
    hosts_without = sorted({host for host, is_listed, _ in reports if not is_listed})
    if reports[0][2]:
        return CheckResult("output_dir", "FAIL", f"{folder}: {reports[0][2]}", "use a writable folder")
    if hosts_without:
        fix = "use a folder on a file system that all hosts share, because all ranks write checkpoints"
        return CheckResult("output_dir", "FAIL", f"{folder}: is not shared with {', '.join(hosts_without)}", fix)
    hosts = len({host for host, _, _ in reports})
    shared = f"shared by all {hosts} hosts" if hosts > 1 else "one host"
    return CheckResult("output_dir", "OK", f"{folder}: {shared}")


def check_shard_groups(config: RunConfig, hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Check how many ranks share each copy of the base model in ZeRO-3, and whether a copy spans hosts."""
    within, name = config.zero.shard_within, "zero.shard_within"
    if config.zero.stage != 3:
        return
    try:
        groups = list_shard_groups("host" if within == "auto" else within, hosts)
    except UserError as error:
        yield CheckResult(name, "FAIL", str(error), "see the message")
        return
    sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
    found = f"{within}: {len(groups)} replica(s) of the base model, each sharded over {sizes} ranks"
    if any(len({hosts[rank] for rank in group}) > 1 for group in groups):
        fix = "set zero.shard_within=host if each host has enough memory for a replica"
        yield CheckResult(name, "WARN", f"{found}; every layer's weights cross the network", fix)
    else:
        yield CheckResult(name, "OK", f"{found}, if a replica fits on a host" if within == "auto" else found)


def _is_listed(file: Path) -> bool:
    try:
        return file.name in os.listdir(file.parent)  # queries the file server; `exists` may use a stale cache
    except OSError:
        return False


def check_versions(reports: Sequence[RankReport]) -> Iterator[CheckResult]:
    problems = find_differences(reports)
    for problem, fix in problems:
        yield CheckResult("versions", "FAIL", problem, fix)
    if not problems:
        hosts = len({report.host for report in reports})
        where = "one host" if hosts == 1 else f"the same on all {hosts} hosts"
        yield CheckResult("versions", "OK", f"code and packages of {format_count(len(reports), 'rank')}: {where}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trainer.commands.doctor.ranks")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--world-size", type=int)
    arguments = parser.parse_intermixed_args(argv)
    config = load_config(arguments.config, arguments.overrides).config if arguments.config else None
    try:
        ranks = Ranks.from_environment(expected_world_size=arguments.world_size)
        form_process_group(ranks, TIMEOUT_MINUTES)
    except UserError as error:
        print(RESULT_PREFIX + json.dumps({"checks": [asdict(CheckResult("ranks", "FAIL", str(error)))]}), flush=True)
        return 1
    device = ranks.device()
    reports = gather_objects(build_report(ranks, (config or PLACEHOLDER_CONFIG).model_dump_json()))
    hosts = list(dict.fromkeys(report.host for report in reports))
    findings = [CheckResult("ranks", "OK", f"{format_count(ranks.world_size, 'rank')} on {', '.join(hosts)}")]
    findings += [*check_versions(reports), *check_clocks()]
    if config:
        findings.append(check_output_is_shared(config, ranks))
        findings += check_shard_groups(config, [report.host for report in reports])
    findings += check_all_reduce(device)
    if ranks.is_main:
        print(RESULT_PREFIX + json.dumps({"checks": [asdict(finding) for finding in findings]}), flush=True)
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
