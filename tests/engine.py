"""A real DeepSpeed engine of one rank in the test's own process, around a tiny adapted model, on a CPU or a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import LoraSection, TrainingSection, ZeroSection
from trainer.contract.rendezvous import find_free_port
from trainer.model.adapter import apply_adapter
from trainer.parallel.engine.deepspeed_engine import DTYPES, build_deepspeed_config, start_engine
from trainer.parallel.engine.flat_adapter import flatten_adapter
from trainer.parallel.engine.optimizer import build_optimizer
from trainer.parallel.ranks.group import skip_shm_build
from trainer.patches.deepspeed_workarounds import install_workarounds

IDS = torch.arange(3, 35)[None]


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """This process as the only rank of a group, which computes fp16 on any processor."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    known_groups = dict(vars(groups))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in (*place, "MASTER_PORT")}
    os.environ.update(place, MASTER_PORT=str(find_free_port()))
    backend = "nccl" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "gloo"
    store = dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    with skip_shm_build():
        comm.init_distributed(backend, verbose=False)
    # On a CPU without fp16 instructions, where torch is only slow, DeepSpeed refuses the format.
    accelerator = get_accelerator()
    vars(accelerator)["is_fp16_supported"] = lambda: True
    try:
        yield
    finally:
        del vars(accelerator)["is_fp16_supported"]
        dist.destroy_process_group()
        vars(groups).update(known_groups)  # DeepSpeed would hand the groups that are gone to the next engine
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def tiny_model(dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A random Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=384, num_hidden_layers=2, **shape))
    return model.to(dtype).to(device)


def adapted_engine(
    precision: str, stage: int, device: torch.device, *, flat: bool = False, loraplus: float = 0.0, **training: Any
) -> Any:
    """What `Run` makes: adapter, optimizer, engine; the guard of updates is the caller's."""
    model, lora = tiny_model(DTYPES[precision], device), LoraSection(r=4, alpha=8)
    return adapted_engine_of(model, lora, precision, stage, device, flat=flat, loraplus=loraplus, **training)


def adapted_engine_of(
    model: Any,
    lora: LoraSection,
    precision: str,
    stage: int,
    device: torch.device,
    *,
    flat: bool = False,
    loraplus: float = 0.0,
    **training: Any,
) -> Any:
    """The same around another model."""
    model = apply_adapter(model, lora, DTYPES[precision])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    section = TrainingSection(precision=precision, **training)
    one_buffer = flatten_adapter(model, separate_up=bool(loraplus)) if flat else None
    fused = device.type == "cuda" or precision == "bf16"  # as on a GPU; torch has it on the CPU as well
    optimizer = build_optimizer(model, section, LoraSection(loraplus_lr_ratio=loraplus or None), fused=fused)
    settings = build_deepspeed_config(section, ZeroSection(stage=stage), precision, on_gpu=True, single_gradient=True)
    engine = start_engine(model, optimizer, settings)
    install_workarounds(engine)
    if one_buffer is not None:
        one_buffer.repoint_parameters()
    return engine


def backward(engine: Any, factor: float = 1.0) -> None:
    """One forward and backward pass over IDS, of the loss times `factor`."""
    ids = IDS.to(engine.device)
    logits = engine(input_ids=ids, use_cache=False).logits.float()
    engine.backward(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]) * factor)
