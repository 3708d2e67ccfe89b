"""Times ways to cut the passes over dY and x on sm_90a, and how far the cost models' choices are from the best of them.

    python -m tests.bench.rank_cuts [OTHER.cu ...]        on an H200, with nvcc and g++

What the times in ops/csrc/rank/plan.cu are fitted to. Timed are, of each shape, the choice of plan.cu, of every OTHER
and of the smaller models of plan_constants.py, and what plan.cu holds for the next best; from 2048 tokens on right
after whole products, as in training. A cut is the columns of a CTA in blocks of 128, the CTAs of a cluster, and the
tiles of a CTA along the other direction.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.bench.plan_constants import CSRC, PLAN, Model, Shape, smaller

HERE = Path(__file__).resolve().parent
TARGET = ["-gencode", "arch=compute_90a,code=sm_90a"]
INCLUDES = [f"-I{folder}" for folder in CSRC.iterdir()]
FLAGS = ["-O3", "-std=c++17", "-DZEROLORA_HOPPER", "-diag-suppress", "177", *TARGET, *INCLUDES]
KINDS, RANKS = ("dY", "h", "dA"), (16, 32, 64)
SIZES = (
    (512, 4096), (512, 14336), (512, 28672), (1024, 4096), (1024, 14336), (1536, 4096), (1536, 14336),
    (2048, 4096), (2048, 14336), (4096, 4096), (4096, 14336), (8192, 1024), (8192, 4096), (8192, 14336),
    (12288, 5120), (16384, 4096), (32768, 4096),
)  # fmt: skip
CHEAPEST = 12
Cut = tuple[int, int, int]


def build(folder: Path) -> Path:
    kernels = ("rank/rank_wgmma.cu", "rank/reduce.cu", "frozen/frozen.cu")
    sources = [HERE / "rank_cuts.cu", *(CSRC / name for name in kernels)]
    objects = [folder / f"{source.stem}.o" for source in sources]
    compilers = [
        subprocess.Popen(["nvcc", *FLAGS, "-c", "-o", str(target), str(source)], stderr=subprocess.DEVNULL)
        for source, target in zip(sources, objects, strict=True)
    ]
    if any([compiler.wait() for compiler in compilers]):  # waits for all
        raise SystemExit("rank_cuts: nvcc failed; run it by hand: nvcc " + " ".join([*FLAGS, "-c", str(sources[0])]))
    program = folder / "rank_cuts"
    subprocess.run(["nvcc", *TARGET, "-o", str(program), *map(str, objects)], check=True)
    return program


def models(others: list[Path], folder: Path, slots: list[int]) -> dict[str, Model]:
    """By name: plan.cu, other sources, and plan.cu with fewer constants."""
    found = {path.stem if path != PLAN else "plan.cu": Model(path, folder) for path in (PLAN, *others)}
    first = found["plan.cu"]
    for name, values in smaller(first.sets, first.fields):
        found[name] = Model(PLAN, folder)
        found[name].set(values)
    for model in found.values():
        model.has_slots(slots)
    return found


def candidates(shape: Shape, by: dict[str, Model]) -> tuple[dict[str, Cut], list[Cut]]:
    """What each model chooses, and all that is timed."""
    chosen = {name: model.cuts(shape)[int(model.times(shape).argmin())] for name, model in by.items()}
    first = by["plan.cu"]
    cuts, order = first.cuts(shape), first.times(shape).argsort(kind="stable")
    return chosen, list(dict.fromkeys([*chosen.values(), *(cuts[int(index)] for index in order[:CHEAPEST])]))


def timed(program: Path, wanted: list[tuple[Shape, Cut]]) -> list[float]:
    """Microseconds of each; whole lines of a program that was cut off as well."""
    lines = [" ".join(map(str, (kind, T, D, R, *cut))) for (kind, T, (D, *_), R), cut in wanted]
    limit = float(os.environ.get("RANK_CUTS_SECONDS", 600))
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=output, text=True)
        try:
            running.communicate("\n".join(lines) + "\n", timeout=limit)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        output.seek(0)
        return [float(line) for line in output if line.endswith("\n")]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("other", nargs="*", type=Path, help="another plan.cu, by which cuts are chosen as well")
    others = parser.parse_args().other
    shapes: list[Shape] = [(kind, T, (D,), R) for T, D in SIZES for kind in range(3) for R in RANKS]
    with tempfile.TemporaryDirectory() as scratch:
        program = build(Path(scratch))
        slots = subprocess.run([program, "slots"], capture_output=True, text=True)
        if slots.returncode:
            raise SystemExit(slots.stderr.strip() or f"rank_cuts: the program ended with {slots.returncode}")
        print("multiprocessors that clusters of 0 to 8 CTAs fill:", slots.stdout)
        by = models(others, Path(scratch), [int(word) for word in slots.stdout.split()])
        found = {shape: candidates(shape, by) for shape in shapes}
        wanted = [(shape, cut) for shape, (_, cuts) in found.items() for cut in cuts]
        times = dict(zip(wanted, timed(program, wanted), strict=False))
    print(f"{len(times)} of {len(wanted)} cuts timed")
    print(f"{'':<3}{'R':>3}{'T':>7}{'D':>7} | " + "   blocks x cluster x tiles: microseconds")
    longer: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for shape, (chosen, cuts) in found.items():
        of = {cut: times[shape, cut] for cut in cuts if (shape, cut) in times}
        if len(of) < len(cuts):
            break
        kind, T, (D, *_), R = shape
        each = ", ".join(f"{'x'.join(map(str, cut))}: {of[cut]:.1f}" for cut in sorted(of, key=of.__getitem__))
        print(f"{KINDS[kind]:<3}{R:>3}{T:>7}{D:>7} | {each}")
        for name, cut in chosen.items():
            group = f"{KINDS[kind]}, T {'>=' if T >= 2048 else '<'} 2048"
            longer[name][group].append(100 * (of[cut] / min(of.values()) - 1))
    for name, groups in longer.items():
        print(f"{name}: longer than the best that was timed, on average and at most")
        for group, percents in groups.items():
            print(f"  {group:<14}{statistics.mean(percents):7.1f} %{max(percents):7.1f} %")


if __name__ == "__main__":
    main()
