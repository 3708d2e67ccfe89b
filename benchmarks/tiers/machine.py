"""What a tier finds on this machine: a card or none, weights real or random, the data, how long a CPU would take."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from examples.demo import HUB_NAME, demo_model
from trainer.config import ModelSection, RunConfig, UserError, load_config
from trainer.data.demo_data import demo_data

CPU = "cpu"
# What the CUDA context and cuBLAS take beside torch's allocations, with room to spare.
CONTEXT_GIB = 1.0
# Passes over the weights in a training step: forward, the gradient of the activations, and as much again for everything
# that is no matrix product.
PASSES = 4
LOOK = "import torch as t; print(*t.cuda.mem_get_info(), t.cuda.get_device_name(), sep='|')"
ALPACA = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}### Response:\n{{ turn.content }}{{ eos_token }}"
    "{% elif turn.role == 'user' %}### Instruction:\n{{ turn.content }}\n\n{% else %}{{ turn.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
# Imports, the fused operators' self-test, the first and the last save.
CPU_START_S = 30.0


@dataclass(frozen=True)
class Machine:
    """The first GPU, or the CPU where that was asked for."""

    text: str
    on_gpu: bool
    free_gib: float | None = None
    context_gib: float = CONTEXT_GIB
    card: str = CPU
    """Its name alone."""


@dataclass(frozen=True)
class Weights:
    """The base model of a tier and where it comes from."""

    model: str
    real: bool
    text: str


def this_machine(*, cpu: bool) -> Machine:
    """Raises UserError where there is no GPU and the CPU was not asked for."""
    import torch

    if cpu:
        return Machine(f"CPU, {os.cpu_count()} cores: time, memory and throughput are not asserted", on_gpu=False)
    if os.environ.get("DS_ACCELERATOR") == CPU or not torch.cuda.is_available():
        raise UserError("zerolora tier: no NVIDIA GPU here; --cpu runs it on the CPU and says how long that takes")
    # A process of its own: what looks at a card's memory takes some of it until it ends.
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"zerolora tier: the GPU does not answer ({reason}); zerolora doctor says more")
    free, total, name = result.stdout.strip().split("|")
    text = f"{name}, {int(free) / 2**30:.1f} of {int(total) / 2**30:.1f} GiB free"
    return Machine(text, on_gpu=True, free_gib=int(free) / 2**30, card=name)


def cache_folder() -> Path:
    """The cache that `make demo` uses as well."""
    return Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser().resolve()


def find_weights(config: Path, shape: str, base_model: str | None, models: Path | None) -> Weights:
    """The tier's model: as told, in `models`, in the hub's cache, from the demonstration; else random of that shape."""
    from trainer.model.published_shapes import PREFIX, is_random

    if base_model is not None:
        return Weights(base_model, not is_random(base_model), "as asked for")
    name = load_config(config).config.base_model
    if models is not None and not models.is_dir():
        raise UserError(f"--models {models}: no such folder; name the folder that holds the models' folders")
    found = models / name.rpartition("/")[2] if models is not None else None
    if found is not None and found.is_dir():
        return Weights(str(found), True, "real weights, in --models")
    cached = _in_hub_cache(name)
    if cached is not None:
        return Weights(str(cached), True, f"real weights of {name}, in the hub's cache")
    if name == HUB_NAME:
        demo = _from_demo()
        if isinstance(demo, Path):
            return Weights(str(demo), True, "real weights, those of `make demo`")
        reason = demo
    else:
        reason = f"{name} is not on this machine; `zerolora download {name}` gets it"
    return Weights(f"{PREFIX}{shape}", False, f"random weights of the true shape: {reason}")


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) and (folder / "tokenizer_config.json").is_file() else None


def _from_demo() -> Path | str:
    """The folder of SmolLM2-135M, made on first use, or why it cannot be had."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, which transformers imports, logs to standard output
            return demo_model(cache_folder())
    except UserError as error:
        return str(error)


def find_data(config: Path) -> list[str]:
    """Overrides that name the demonstration's data, made of this Python's standard library."""
    train, held_out = demo_data(cache_folder())
    overrides = [f"dataset.path={train}"]
    if load_config(config).config.dataset.evaluation is not None:
        overrides.append(f"dataset.evaluation.path={held_out}")
    return overrides


def find_template(base_model: str) -> list[str]:
    """For a base model without a chat template (SmolLM2-135M, Llama-2-7b-hf) an override with Alpaca's form; else none.

    The data is conversations, which without a template have no form at all.
    """
    from trainer.model.base import load_tokenizer

    try:
        template = load_tokenizer(base_model, ModelSection()).chat_template
    except UserError:
        return []  # the run itself says so, and the other tiers go on
    return [] if template else [f"dataset.chat_template={ALPACA}"]


def cpu_time(settings: RunConfig, base_model: str) -> float:
    """Estimate the run's seconds on this CPU, to a factor of two.

    start + 2 x PASSES x parameters x tokens / measured operations a second.
    """
    from trainer.model.base import empty_model, load_model_config

    training = settings.training
    model = empty_model(load_model_config(base_model, settings.model), settings.model)
    model.tie_weights()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = settings.dataset.max_length * training.batch_size * training.gradient_accumulation_steps
    return CPU_START_S + 2 * PASSES * parameters * tokens * (training.max_steps or 0) / _products_per_second()


def _products_per_second() -> float:
    """Floating-point operations a second of a matrix product of 1024 on this CPU, with the threads that a rank gets."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    left = torch.randn(1024, 1024)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * 1024**3 / min(seconds)
