"""Peak memory and images per second of image models of true shape with random weights, versus diffusers with PEFT.

python -m tests.bench.bench_images OUT ours|diffusers CASE ... [--profile]
A line of JSON for each case, also in OUT/images.jsonl; `--profile` (ours): the time of a few more steps by category, as
`zerolora bench --profile` has it.

Both train LoRA r 16 on attention and feed-forward in bf16, batch 1, with latents and conditions at hand. The other loop
is that of diffusers' scripts: factors in 32 bits, autocast, torch's fused AdamW, clipping.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

STEPS = 10
CASES: dict[str, dict[str, Any]] = {
    "sdxl-512": {"base_model": "random:sdxl", "resolution": 512},
    "sdxl-1024-r": {"base_model": "random:sdxl", "resolution": 1024, "recompute": True},
    "sd3.5-medium-1024-r": {"base_model": "random:sd3.5-medium", "resolution": 1024, "recompute": True},
    "sd3.5-large-1024-r": {"base_model": "random:sd3.5-large", "resolution": 1024, "recompute": True},
    "flux-1024-r": {"base_model": "random:flux-dev", "resolution": 1024, "recompute": True, "cudnn": False},
    "flux-1024-r-nf4": {
        "base_model": "random:flux-dev",
        "resolution": 1024,
        "recompute": True,
        "adapter": "qlora",
        "cudnn": False,
    },
    "tiny-unet": {"family": "sdxl", "resolution": 64},
    "tiny": {
        "base_model": "random:sd3.5-medium,num_layers=2,num_attention_heads=2,caption_projection_dim=128",
        "resolution": 64,
        "recompute": True,
    },
}


def settings(case: dict[str, Any], out: Path, name: str, profiled: int) -> dict[str, Any]:
    """The configuration of one case; `profiled` more steps are recorded."""
    return {
        "base_model": case.get("base_model") or str(out / "pipelines" / case["family"]),
        "adapter": case.get("adapter", "lora"),
        "output_dir": str(out / name),
        "lora": {"r": 16, "alpha": 16},
        "dataset": {"path": str(out / f"pictures-{case['resolution']}"), "cache_dir": str(out / "cache")},
        "image": {"resolution": case["resolution"]},
        "training": {
            "max_steps": STEPS + profiled,
            "gradient_checkpointing": bool(case.get("recompute")),
            "precision": "bf16",
            "save_steps": 0,
            "learning_rate": 1e-4,
        },
        "logging": {"report_to": "none", "progress": "off", "profile_steps": profiled},
        "output": {"overwrite": "delete"},
    }


def ours(out: Path, name: str, *, profile: bool = False) -> dict[str, Any]:
    """A whole run in a process of its own."""
    from benchmarks.bench.cases import PROFILED
    from tests.pipelines import make_pipeline, write_images

    case = CASES[name]
    side = case["resolution"]
    if not (out / f"pictures-{side}").exists():
        write_images(out / f"pictures-{side}", 4, sizes=((side, side),))
    if "family" in case:
        make_pipeline(out / "pipelines" / case["family"], case["family"])
    config = out / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings(case, out, name, PROFILED if profile else 0)))
    began = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        done = subprocess.run([sys.executable, "-m", "trainer.train", str(config)], stdout=log, stderr=log, check=False)
    if done.returncode:
        return {"failed": (out / f"{name}.log").read_text()[-1500:]}
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line["perf/step_ms"] for line in lines if "perf/step_ms" in line]
    peak = max(line["memory/peak_gib"] for line in lines if "memory/peak_gib" in line)
    found = summary(peak, [each / 1e3 for each in steps[:STEPS]], time.perf_counter() - began)
    return found | ({"profile": profile_of(out / name)} if profile else {})


def profile_of(run: Path) -> dict[str, Any]:
    """Milliseconds of a step by category, and the kernels that take most of each."""
    from benchmarks.bench.trace import Shape, breakdown, categorise_kernels, longest, read_trace

    works = categorise_kernels(read_trace(run / "profile" / "rank-0.json.gz"), Shape(vocabulary=-1, rank=16))
    by_category, step_ms, steps = breakdown(works)
    most = {category: longest(works, category) for category in by_category}
    return {"steps": steps, "step_ms": step_ms, "by_category_ms": by_category, "floor_ms": None, "longest": most}


def diffusers_loop(out: Path, name: str) -> dict[str, Any]:
    """The loop of diffusers' scripts."""
    import torch
    from peft import LoraConfig

    from trainer.config import ModelSection
    from trainer.setup.joining import disable_cudnn_attention
    from trainer.tasks.images.encoding import build_random_conditions
    from trainer.tasks.images.pipeline import read_pipeline

    case = CASES[name]
    if not case.get("cudnn", True):
        disable_cudnn_attention()  # its derivative ends such a loop in an illegal memory access
    pipeline = read_pipeline(case["base_model"], ModelSection())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    denoiser = random_denoiser(pipeline, device, nf4=case.get("adapter") == "qlora")
    targets = list_default_targets(pipeline)
    denoiser.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if case.get("recompute"):
        denoiser.enable_gradient_checkpointing()
    denoiser.train()
    trained = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    conditions = {
        key: value[None].to(device) for key, value in build_random_conditions(pipeline, "a red circle").items()
    }
    side = case["resolution"] // pipeline.downsampling
    conditions["sizes"] = torch.full((1, 6), float(case["resolution"]), device=device)
    conditions["guidance"] = torch.ones(1, device=device)
    latents = torch.randn(1, pipeline.channels, side, side, device=device)
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        began = time.perf_counter()
        noise, level = torch.randn_like(latents), torch.rand(1, device=device)
        noisy, times = (1 - level) * latents + level * noise, (level * 999).long()
        with torch.autocast(device.type, torch.bfloat16):
            predicted = pipeline.family.predict(denoiser, noisy.bfloat16(), times, conditions)
        loss = (predicted.float() - noise).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return summary(peak, seconds, sum(seconds))


def random_denoiser(pipeline: Any, device: Any, *, nf4: bool) -> Any:
    """The denoiser in bf16, or with bitsandbytes' own 4-bit layers, as diffusers loads them."""
    import bitsandbytes as bnb
    import torch
    from torch import nn

    denoiser = pipeline.build_empty_denoiser()
    denoiser.requires_grad_(False)
    for path, module in list(denoiser.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            value = value.normal_(0.0, 0.02) if value.dim() > 1 else value.fill_(float(name == "weight"))
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        if nf4 and type(module) is nn.Linear:
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                module.bias is not None,
                torch.bfloat16,
                quant_type="nf4",
                device="meta",  # no cost for initial values
            )
            packed.weight = bnb.nn.Params4bit(module.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            packed.bias = module.bias
            parent, _, last = path.rpartition(".")
            setattr(denoiser.get_submodule(parent) if parent else denoiser, last, packed.to(device))
            module.weight.data = module.weight.data.new_empty(0)
    return denoiser.to(device)


def list_default_targets(pipeline: Any) -> list[str]:
    """The same layers as ours, by their whole paths."""
    from trainer.tasks.images.model import ImageModel

    prefix = f"{pipeline.family.denoiser}."
    return [path.removeprefix(prefix) for path in ImageModel(pipeline).list_default_targets()]


def summary(peak: float, seconds: list[float], wall: float) -> dict[str, Any]:
    """The first steps warm up."""
    step = median(seconds[3:])
    return {"peak_gib": round(peak, 2), "step_ms": round(step * 1e3, 1), "pictures_s": round(1 / step, 3), "s": wall}


def main() -> None:
    from rich.console import Console

    from benchmarks.bench.report import build_profile_table

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("who", choices=("ours", "diffusers"))
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.who != "ours" and (arguments.profile or "tiny-unet" in arguments.cases):
        parser.error("--profile and tiny-unet: for ours")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases:
        if arguments.who == "ours":
            found = ours(arguments.out, name, profile=arguments.profile)
        else:
            found = diffusers_loop(arguments.out, name)
        line = json.dumps({"case": name, "who": arguments.who, **found})
        with (arguments.out / "images.jsonl").open("a") as file:
            file.write(line + "\n")
        profile = found.pop("profile", None)
        print(json.dumps({"case": name, "who": arguments.who, **found}), flush=True)
        if profile is not None:
            Console(width=100).print(build_profile_table(profile))


if __name__ == "__main__":
    main()
