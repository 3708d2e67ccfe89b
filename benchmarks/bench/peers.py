"""LoRA step of one peer on this machine, with the shape, tokens and adapter that `zerolora bench` measures.

`python -m benchmarks.bench.peers STACK ASSIGNMENT.json` measures every case of it in this one process and prints a line
`RESULT {json}` for each as soon as it is known. Weights are random; each stack is used as its own documentation says:

peft        PEFT on unmodified transformers, bf16 adapter, torch's fused AdamW
peft-liger  the same with Liger's kernels for norms, SwiGLU, rotary embedding and the loss
deepspeed   the same under DeepSpeed ZeRO (the stage of the assignment), with Liger on a GPU
axolotl     its ModelLoader with its LoRA kernels (no figure of it is published here yet)
unsloth     FastLanguageModel, its own gradient checkpointing (which offloads) if the case recomputes
"""

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.bench.assignment import Assignment, Case

STACKS = ("peft", "peft-liger", "deepspeed", "unsloth", "axolotl")
NEEDS = {
    "peft": ("peft",),
    "peft-liger": ("peft", "liger_kernel"),
    "deepspeed": ("peft", "deepspeed"),
    "unsloth": ("unsloth",),
    "axolotl": ("axolotl", "triton"),
}
# Why they are not in zerolora's own environment.
OF_THEIR_OWN = {
    "unsloth": "it wants datasets < 5, zerolora datasets >= 5.2",
    "axolotl": "it pins forty packages, transformers, peft and datasets to other versions than zerolora's",
}
PACKAGE_OF = {"liger_kernel": "liger-kernel"}
RESULT = "RESULT "
LEFT_OVER_GIB = 0.2


def missing_package(stack: str, folder: str | None = None) -> str | None:
    """Return how to install a stack's missing packages, or None; searches `folder` first and imports nothing."""
    paths = [folder, *sys.path] if folder else sys.path
    missing = [name for name in NEEDS[stack] if PathFinder.find_spec(name, paths) is None]
    if not missing:
        return None
    if stack in OF_THEIR_OWN and stack in missing:
        return (
            f"not installed: {OF_THEIR_OWN[stack]}; pip install --target FOLDER {stack}, and --peer-packages "
            f"{stack}=FOLDER"
        )
    return f"not installed: pip install {PACKAGE_OF.get(missing[0], missing[0])}"


def list_packages(stack: str) -> dict[str, str]:
    import torch

    names = list(NEEDS[stack])
    if stack == "deepspeed" and torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        names.append("liger_kernel")
    return {PACKAGE_OF.get(name, name): version(PACKAGE_OF.get(name, name)) for name in names}


def measure(stack: str, case: Case, assignment: Assignment) -> dict[str, Any]:
    """Run the steps of one case: milliseconds each, peak GiB, the last loss."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    batches = assignment.batches(case).to(device)
    torch.manual_seed(0)
    if stack == "unsloth":
        from benchmarks.bench.unsloth import load_unsloth_model

        model = load_unsloth_model(case, Path(assignment.folder))
    elif stack == "axolotl":
        from benchmarks.bench.axolotl import load_axolotl_model

        model = load_axolotl_model(case, Path(assignment.folder))
    else:
        model = build_peft_model(case, device, with_liger="liger-kernel" in list_packages(stack))
    model.train()
    step = build_deepspeed_step(model, case) if stack == "deepspeed" else build_plain_step(model, stack, on_gpu)
    times: list[float] = []
    loss = None
    for number, tokens in enumerate(batches):
        if number == assignment.warmup and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            loss = step(tokens)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            loss = step(tokens)
            times.append((time.perf_counter() - begin) * 1e3)
    assert loss is not None
    return {
        "case": case.name,
        "stack": stack,
        "step_ms": times[assignment.warmup :],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "loss": float(loss),
        "versions": list_packages(stack),
    }


def build_peft_model(case: Case, device: Any, *, with_liger: bool) -> Any:
    """Build transformers' model with random weights, optionally quantized by bitsandbytes, with PEFT's adapter."""
    import torch
    from peft import LoraConfig, get_peft_model

    from trainer.config import ModelSection
    from trainer.model.base import load_base_model, load_model_config

    if with_liger:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[load_model_config(case.base_model, ModelSection()).model_type]()
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    model = load_base_model(case.base_model, ModelSection(), dtype=dtype, device=device, attention="sdpa")
    if case.four_bit:
        _quantize(model, dtype)
    targets: Any = "all-linear" if case.targets == ["all-linear"] else case.targets
    lora = LoraConfig(r=case.rank, lora_alpha=case.alpha, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if case.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def _quantize(model: Any, dtype: Any) -> None:
    """Replace every linear layer but the head by bitsandbytes' own NF4 layer, double-quantized."""
    import bitsandbytes
    import torch

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not torch.nn.Linear or linear is head:
                continue
            with torch.device("meta"):
                layer = bitsandbytes.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    compute_dtype=dtype,
                    compress_statistics=True,
                    quant_type="nf4",
                )
            weight = bitsandbytes.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            layer.weight, layer.bias = weight.to(linear.weight.device), linear.bias
            setattr(parent, name, layer)
    model.is_loaded_in_4bit = True


def build_plain_step(model: Any, stack: str, on_gpu: bool) -> Callable[[Any], Any]:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu)
    autocast = stack in OF_THEIR_OWN  # as in their own trainers

    def step(tokens: Any) -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def build_deepspeed_step(model: Any, case: Case) -> Callable[[Any], Any]:
    """Return the same through DeepSpeed's engine, as in its tutorial."""
    import deepspeed
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_gpu = trained[0].is_cuda
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-4, fused=on_gpu),
        model_parameters=trained,
        config={
            "train_micro_batch_size_per_gpu": case.batch_size,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": case.bf16},
            "zero_optimization": {"stage": case.stage, "overlap_comm": on_gpu, "contiguous_gradients": True},
            "gradient_clipping": 1.0,
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(tokens: Any) -> Any:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def main(argv: list[str] | None = None) -> int:
    """Measure case after case until one fails or leaks memory; the parent then starts another process."""
    stack, path = sys.argv[1:] if argv is None else argv
    assignment = Assignment.read(Path(path))
    if stack == "unsloth":
        import unsloth  # noqa: F401 (patches transformers, and so must come first)
    for case in assignment.cases:
        try:
            result = measure(stack, case, assignment)
        except Exception as error:  # reported to the parent, and in full in the log
            traceback.print_exc()
            result = {"case": case.name, "stack": stack, "error": f"{type(error).__name__}: {error}"[:300]}
        if int(os.environ.get("RANK", 0)) == 0:
            print(RESULT + json.dumps(result), flush=True)
        if "error" in result:
            return 1
        # Several ranks must not decide separately.
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 or _left_over_gib() > LEFT_OVER_GIB:
            return 0  # would distort the next case's peak, so it gets a fresh process
    return 0


def _left_over_gib() -> float:
    """Return the GPU memory in GiB that is still allocated after a case."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


if __name__ == "__main__":
    sys.exit(main())
