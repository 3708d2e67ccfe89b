"""How much memory a rank needs at most while the base model is loaded; see test_memory.py."""

import gc
import json
from pathlib import Path

import torch

from tests.rank_program import join
from trainer.config import ModelSection, QuantizationSection, TrainingSection, ZeroSection
from trainer.model.base import load_base_model
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config
from trainer.parallel.ranks.group import exit_process, leave_process_group


def peak_growth(load: object) -> int:
    """Bytes by which the process's peak resident memory exceeds what it had before `load()`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    kept = load()  # type: ignore[operator]
    for parameter in kept.parameters():
        parameter.sum()  # pages of a mapped file count once they are touched
    peak = _status("VmHWM") - before
    del kept
    return peak


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> int:
    folder, ranks = join(timeout_minutes=5)
    partitioned = build_deepspeed_config(TrainingSection(), ZeroSection(stage=3), "fp32", on_gpu=False)
    cases = {
        "whole": ("", None, None),
        "lora": ("", None, partitioned),
        "qlora": ("", QuantizationSection(), partitioned),
        "experts-lora": ("-experts", None, partitioned),
        "experts-qlora": ("-experts", QuantizationSection(), partitioned),
    }
    peaks = {}
    for warm in (True, False):  # the first round pays for imports and communication buffers
        for name, (kind, quantization, config) in cases.items():
            path = str(folder / (("small" if warm else "model") + kind))
            peaks[name] = peak_growth(
                lambda path=path, quantization=quantization, config=config: load_base_model(
                    path,
                    ModelSection(),
                    dtype=torch.float32,
                    device=ranks.device(),
                    attention="sdpa",
                    quantization=quantization,
                    deepspeed_config=config,
                )
            )
    (folder / f"peaks-{ranks.rank}.json").write_text(json.dumps(peaks))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
