"""Times the frozen product with the adapter's term in it over shapes of models of 0.1 to 8 billion weights.

    python -m tests.bench.frozen_shapes        about 12 s on an H200

What `frozen_wins` (ops/csrc/operator/products.h) is fitted to. "full" is the fraction of whole rounds of tiles that is
used; the other columns are those of `bench_lora --table frozen` at rank 16.
"""

import torch

import ops
from tests.bench import bench_lora

TOKENS = (4096, 4352, 5120, 8192, 16384)
LINEARS = [  # O, I
    *((576, 576), (192, 576), (1536, 576), (576, 1536)),  # SmolLM2-135M
    *((2048, 2048), (256, 2048), (5632, 2048), (2048, 5632)),  # TinyLlama-1.1B
    *((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)),  # Qwen2.5-7B
    *((4096, 4096), (1024, 4096)),  # Llama-3.1-8B
]
MAX_ELEMENTS = 2**28  # elements of x or y


def filled(T: int, cols: int) -> float:
    """Of tiles of 256 x 256 by clusters of two multiprocessors."""
    at_once = torch.cuda.get_device_properties(0).multi_processor_count // 2
    rounds = -(-(-(-T // 256) * -(-cols // 256)) // at_once)
    return T * cols / (rounds * at_once * 256 * 256)


def main() -> None:
    ops.load_backend("cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {bench_lora.commit()}, bf16, microseconds"
    )
    print(f"{'full':>5} {'O x I':<9}{'T':>6}    | {'cuBLAS':>8}{'TFLOP/s':>8} | {'ours':>8}{'+%':>6}", end="")
    print(f" | {'before':>8}{'with':>8}{'+%':>6}{'saved':>7}")
    for T in TOKENS:
        for out, width in LINEARS:
            if T * max(out, width) > MAX_ELEMENTS:
                continue
            for forward in (True, False):
                line = bench_lora.line_of_frozen(f"{out}x{width}", T, (out,), width, [16], forward)
                print(f"{filled(T, out if forward else width):5.2f} {line}", flush=True)


if __name__ == "__main__":
    main()
