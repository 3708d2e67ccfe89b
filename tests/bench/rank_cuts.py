"""Times ways to cut the passes over dY and x on sm_90a, and how far the cost model's choice is from the best of them.

    python -m tests.bench.rank_cuts [hot|cool]        on an H200, with nvcc

What the times in ops/csrc/rank/plan.cu are fitted to. hot: each measurement comes right after whole products, as in
training. A line is a shape: what the model chooses, and the best of the 24 cuts (12 for h or dA alone) that it holds
for the cheapest; a cut is the columns of a CTA in blocks of 128, the CTAs of a cluster, and the tiles of a CTA along
the other direction.
"""

import argparse
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

HERE, CSRC = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2] / "ops" / "csrc"
TARGET = ["-gencode", "arch=compute_90a,code=sm_90a"]
INCLUDES = [f"-I{folder}" for folder in CSRC.iterdir()]
FLAGS = ["-O3", "-std=c++17", "-DZEROLORA_HOPPER", "-diag-suppress", "177", *TARGET, *INCLUDES]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("state", nargs="?", default="hot", choices=["hot", "cool"])
    state = parser.parse_args().state
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run([str(build(Path(folder))), state], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(found.stderr.strip() or f"rank_cuts: the program ended with {found.returncode}")
    shapes: dict[tuple[str, ...], list[tuple[float, str]]] = defaultdict(list)
    for line in found.stdout.splitlines():
        kind, T, D, R, blocks, cluster, length, ctas, us, _ = line.split()
        shapes[kind, R, T, D].append((float(us), f"{blocks} x {cluster} x {length} ({ctas} CTAs)"))
    print(f"{'':<3}{'R':>3}{'T':>7}{'D':>7} | {'chosen':>8}  {'':<24} | {'best':>8}  {'':<24} | {'+%':>5}")
    longer = defaultdict(list)
    for (kind, R, T, D), cuts in shapes.items():
        (chosen, cut), (best, other) = cuts[0], min(cuts)
        longer[kind, R].append(100 * (chosen / best - 1))
        measured = f"{chosen:8.1f}  {cut:<24} | {best:8.1f}  {other:<24} | {longer[kind, R][-1]:5.1f}"
        print(f"{kind:<3}{R:>3}{T:>7}{D:>7} | {measured}")
    for (kind, R), percents in longer.items():
        mean = statistics.mean(percents)
        print(f"{kind}, R = {R}: {mean:.1f} % longer than the best on average, {max(percents):.1f} % at most")


if __name__ == "__main__":
    main()
