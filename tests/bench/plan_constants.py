"""Which constants of the cost model in ops/csrc/rank/plan.cu change what is chosen, and what a smaller one would cost.

python -m tests.bench.plan_constants               each constant neutralised alone, sets of them, then as many as go
python -m tests.bench.plan_constants FULL.cu       what the choices of plan.cu cost by the model of FULL.cu

No GPU: the planner is compiled for the host (g++ and CUDA's headers), with the multiprocessors of an H200 that clusters
fill. Every cut of every shape gets its time by the full model; a model that chooses another cut costs the difference.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CSRC = Path(__file__).resolve().parents[2] / "ops" / "csrc"
PLAN = CSRC / "rank" / "plan.cu"
TOKENS = (512, 1024, 1536, 2048, 4096, 8192, 12288, 16384, 32768)
WIDTHS = (1024, 2048, 4096, 8192, 11008, 14336)
SIBLINGS = ((4096, 1024, 1024), (14336, 14336))
RANKS = (16, 32, 64)
LIMIT = 0.01
"""Of the time of a pass by the full model: more than that no smaller model may lose on any shape."""
SHIM = """
namespace zerolora {
extern "C" { int slots[9] = {0, 132, 132, 129, 132, 0, 102, 0, 120}; }
int wgmma_slots(int cluster, const Device& device) { return slots[cluster]; }
Plan plan_rank_simt(const RankPass&, const Device&) { return {}; }
cudaError_t launch_rank_simt(const RankWork&, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_rank_mma(const RankWork&, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_rank_wgmma(const RankWork*, int, cudaStream_t) { return cudaSuccess; }
}  // namespace zerolora
extern "C" int times_of_cuts(int kind, long T, const long* widths, int count, int R, double* times, long* cuts) {
  using namespace zerolora;
  static int64_t seed = 0;
  RankWork works[kMaxMerged];
  const Device device{132, 90, 232448, 233472};
  for (int i = 0; i < count; ++i) {
    RankPass& pass = works[i].pass;
    pass.dtype = DType::bf16, pass.T = T, pass.D = widths[i], pass.ldz = widths[i], pass.R = R, pass.z = times;
    if (kind < 2) pass.p = times, pass.p_by_rank = kind == 1, pass.ldp = kind == 1 ? widths[i] : R;
    if (kind != 1) pass.v = times, pass.ldv = R, pass.g_by_rank = kind >= 2;
    if (kind == 3) pass.dropout.seed = &seed;
    works[i].plan = tensor_core_plan(pass, Path::wgmma);
  }
  works[0].plan.merged = count;
  int n = 0;
  try_cuts(works, count, device, [&](const Cut& how, double time) {
    cuts[3 * n] = how.blocks, cuts[3 * n + 1] = how.cluster, cuts[3 * n + 2] = how.length;
    times[n++] = time;
  });
  return n;
}
"""
Shape = tuple[int, int, tuple[int, ...], int]


class Model:
    """A compiled planner with adjustable constants."""

    def __init__(self, source: Path, folder: Path) -> None:
        text = source.read_text()
        self.sets = {
            name: [float(value) for value in values.split(",")]
            for name, values in re.findall(r"constexpr Times\w+ (k\w+)\{([^}]*)\};", text)
        }
        singles = re.findall(r"^constexpr double (k\w+) = ([\d.e+-]+);", text, re.MULTILINE)
        self.sets |= {name: [float(value)] for name, value in singles}
        structs = {
            kind: [field.strip() for field in re.sub(r"\s+", " ", fields).replace("double ", "").split(",")]
            for kind, fields in re.findall(r"struct (Times\w+) \{\s*double ([^;]*);\s*\}", text)
        }
        kinds = {name: kind for kind, name in re.findall(r"constexpr (Times\w+) (k\w+)\{", text)}
        self.fields = {name: structs[kinds[name]] if name in kinds else [""] for name in self.sets}
        text = re.sub(r"constexpr (Times\w+ k\w+\{)", r"\1", text)
        text = re.sub(r"^constexpr (double k\w+ = )", r"\1", text, flags=re.MULTILINE)
        place = "".join(
            f'extern "C" double* at_{name}() {{ return (double*)&zerolora::{name}; }}\n' for name in self.sets
        )
        file = folder / f"{source.stem}-{len(list(folder.iterdir()))}.cpp"
        file.write_text("#include <cuda_runtime_api.h>\n#define ZEROLORA_HOPPER\n" + text + SHIM + place)
        cuda = Path(subprocess.run(["which", "nvcc"], capture_output=True, text=True, check=True).stdout.strip())
        includes = [cuda.resolve().parents[1] / "include", Path("/usr/local/cuda/include"), *CSRC.iterdir()]
        command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
        subprocess.run([*command, "-o", str(file.with_suffix(".so")), str(file)], check=True)
        self._library = ctypes.CDLL(str(file.with_suffix(".so")))
        self._times, self._cuts = (ctypes.c_double * 100_000)(), (ctypes.c_long * 300_000)()

    def set(self, values: Mapping[str, list[float]]) -> None:
        """Put constants in place; names that are missing keep their own."""
        for name, numbers in (self.sets | dict(values)).items():
            at = getattr(self._library, f"at_{name}")
            at.restype = ctypes.POINTER(ctypes.c_double)
            for index, number in enumerate(numbers):
                at()[index] = number

    def has_slots(self, slots: list[int]) -> None:
        """Take a card's multiprocessors that clusters of 0 to 8 CTAs fill, for those of an H200."""
        here = (ctypes.c_int * 9).in_dll(self._library, "slots")
        for cluster, count in enumerate(slots):
            here[cluster] = count

    def times(self, shape: Shape) -> NDArray[np.float64]:
        """The time of every cut, microseconds; the order is the same in all models."""
        kind, tokens, widths, rank = shape
        numbers = (ctypes.c_long * len(widths))(*widths)
        call = self._library.times_of_cuts
        count = call(kind, ctypes.c_long(tokens), numbers, len(widths), rank, self._times, self._cuts)
        return np.array(self._times[:count])

    def cuts(self, shape: Shape) -> list[tuple[int, int, int]]:
        """Of the same cuts, the columns of a CTA in blocks, the CTAs of a cluster, the tiles of a CTA."""
        numbers = self._cuts[: 3 * len(self.times(shape))]
        return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def shapes() -> list[Shape]:
    """dY with U and G (0), h (1), dA with the mask at hand (2) and drawn (3)."""
    alone = [(kind, t, (d,), r) for kind in range(4) for t in TOKENS for d in WIDTHS for r in RANKS]
    return alone + [(0, t, widths, r) for t in TOKENS for widths in SIBLINGS for r in RANKS]


def losses(
    model: Model, full: list[NDArray[np.float64]], which: list[Shape], values: Mapping[str, list[float]]
) -> NDArray[np.float64]:
    """What the choices of a changed model cost by the full one, for each shape."""
    model.set(values)
    return np.array([
        times[int(model.times(shape).argmin())] / times.min() - 1 for shape, times in zip(which, full, strict=True)
    ])  # fmt: skip


def line(what: str, lost: NDArray[np.float64]) -> str:
    changed = int((lost > 0).sum())
    return f"{what:<58}{changed:>6} of {len(lost)}{100 * lost.mean():>9.2f} %{100 * lost.max():>9.2f} %"


def neutral(name: str, field: str, value: float) -> float:
    """Of a time nothing, of a rate or a size so much that it costs nothing."""
    return 1e30 if field in ("memory", "reduce") or name in ("kRead", "kKept") else 0.0


def main(other: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder, which = Path(scratch), shapes()
        model = Model(Path(other[0]) if other else PLAN, folder)
        full = [model.times(shape) for shape in which]
        print(f"{sum(map(len, model.sets.values()))} constants, {len(which)} shapes, {sum(map(len, full))} cuts")
        print(f"{'':<58}{'other choice':>14}{'mean loss':>11}{'most':>11}")
        if other:
            print(line(f"{PLAN.name} by {other[0]}", losses(Model(PLAN, folder), full, which, {})))
            return 0
        lost_by = partial(losses, model, full, which)
        for what, values in smaller(model.sets, model.fields):
            print(line(what, lost_by(values)), flush=True)
        eliminate(model, lost_by)
    return 0


def smaller(sets: dict[str, list[float]], fields: dict[str, list[str]]) -> list[tuple[str, dict[str, list[float]]]]:
    """Models that one may think of."""

    def only(kept: tuple[str, ...]) -> dict[str, list[float]]:
        found = {}
        for name in sets.keys() - {"kRead", "kKept"}:
            pairs = zip(fields[name], sets[name], strict=True)
            found[name] = [value if field in kept else neutral(name, field, value) for field, value in pairs]
        return found

    hot = {"kCoolLow": sets.get("kHotLow"), "kCoolU": sets.get("kHotU"), "kCoolG": sets.get("kHotG")}
    hot |= {"kCoolRank32": sets.get("kHotHigh"), "kCoolRank64": sets.get("kHotHigh")}
    known = {name: values for name, values in hot.items() if values and name in sets}
    models = [
        ("two bandwidths: memory, and what a reduction reads", only(("memory", "reduce"))),
        ("bandwidths and the time of a tile", only(("memory", "reduce", "tile"))),
        ("bandwidths, a tile, a wave", only(("memory", "reduce", "tile", "wave"))),
        ("hot for all", known),
    ]
    return [(what, values) for what, values in models if values]


def eliminate(model: Model, lost_by: partial[NDArray[np.float64]]) -> None:
    """Neutralise one constant after the other, the one that costs least first, while no shape loses LIMIT."""
    kept = {name: list(values) for name, values in model.sets.items()}
    left = [(name, index) for name, values in kept.items() for index, value in enumerate(values) if value]
    print("\neach alone:")
    alone = {}
    for name, index in left:
        values = list(kept[name])
        values[index] = neutral(name, model.fields[name][index], values[index])
        alone[name, index] = lost_by(kept | {name: values})
        print(line(f"without {name}.{model.fields[name][index]}".rstrip("."), alone[name, index]), flush=True)
    print("\ntogether, in the order of what each costs alone:")
    for name, index in sorted(left, key=lambda place: (alone[place].max(), alone[place].mean())):
        values = list(kept[name])
        values[index] = neutral(name, model.fields[name][index], values[index])
        lost = lost_by(kept | {name: values})
        if lost.max() < LIMIT:
            kept[name] = values
            print(line(f"and without {name}.{model.fields[name][index]}".rstrip("."), lost), flush=True)
    for name, values in kept.items():
        print(name, values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
