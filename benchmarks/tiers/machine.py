"""Environment of a tier: GPU or CPU, real or random weights, the data, and the time a CPU would take."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from examples.demo import HUB_NAME, demo_model
from trainer.config import ModelSection, RunConfig, UserError, load_config
from trainer.contract.whole_files import write_json
from trainer.data.demo_data import build_demo_data

CPU = "cpu"
# Memory of the CUDA context and cuBLAS outside torch's allocations, with room to spare.
CONTEXT_GIB = 1.0
# Passes over the weights in a training step: forward, the gradient of the activations, and as much again for everything
# except matrix products.
PASSES = 4
LOOK = "import torch as t; print(*t.cuda.mem_get_info(), t.cuda.get_device_name(), sep='|')"
ALPACA = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}### Response:\n{{ turn.content }}{{ eos_token }}"
    "{% elif turn.role == 'user' %}### Instruction:\n{{ turn.content }}\n\n{% else %}{{ turn.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
# Covers imports, the fused operators' self-test, the first and the last save.
CPU_START_S = 30.0


@dataclass(frozen=True)
class Machine:
    """The first GPU, or the CPU if requested."""

    text: str
    on_gpu: bool
    free_gib: float | None = None
    context_gib: float = CONTEXT_GIB
    card: str = CPU


@dataclass(frozen=True)
class Weights:
    """The base model of a tier and its origin."""

    model: str
    real: bool
    text: str


class Baselines:
    """Tokens per second by tier, in one JSON file per card."""

    def __init__(self, folder: Path, card: str) -> None:
        self.path = folder / f"{re.sub('[^A-Za-z0-9]+', '-', card)}.json"

    def read(self, tier: str) -> float | None:
        """Return the record of a tier, or None. Raises UserError for a file that cannot be read."""
        return self._all().get(tier)

    def keep(self, tier: str, tokens_per_second: float) -> None:
        """Replace the record of a tier."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self._all() | {tier: tokens_per_second})

    def _all(self) -> dict[str, float]:
        if not self.path.is_file():
            return {}
        try:
            return {str(tier): float(rate) for tier, rate in json.loads(self.path.read_text()).items()}
        except (ValueError, AttributeError, TypeError):
            raise UserError(f"{self.path}: not a file of baselines; delete it, and the next run is recorded") from None


def this_machine(*, cpu: bool) -> Machine:
    """Return the machine. Raises UserError without a GPU unless the CPU was requested."""
    import torch

    if cpu:
        return Machine(f"CPU, {os.cpu_count()} cores: time, memory and throughput are not asserted", on_gpu=False)
    if os.environ.get("DS_ACCELERATOR") == CPU or not torch.cuda.is_available():
        raise UserError("zerolora tier: no NVIDIA GPU here; use --cpu to run on the CPU, with an estimate of the time")
    # In a child process: querying a card's memory takes some of it until the process ends.
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"zerolora tier: the GPU does not respond ({reason}); run zerolora doctor")
    free, total, name = result.stdout.strip().split("|")
    text = f"{name}, {int(free) / 2**30:.1f} of {int(total) / 2**30:.1f} GiB free"
    return Machine(text, on_gpu=True, free_gib=int(free) / 2**30, card=name)


def cache_folder() -> Path:
    """Return the cache, which `make demo` uses too."""
    return Path(os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora").expanduser().resolve()


def find_weights(config: Path, shape: str, base_model: str | None, models: Path | None) -> Weights:
    """Find the tier's model: as given, in `models`, in the Hub's cache, from the demo; else random of that shape."""
    from trainer.model.published_shapes import PREFIX, is_random

    if base_model is not None:
        return Weights(base_model, not is_random(base_model), "as asked for")
    name = load_config(config).config.base_model
    if models is not None and not models.is_dir():
        raise UserError(f"--models {models}: no such folder; pass the folder that contains the models' folders")
    found = models / name.rpartition("/")[2] if models is not None else None
    if found is not None and found.is_dir():
        return Weights(str(found), True, "real weights, in --models")
    cached = _in_hub_cache(name)
    if cached is not None:
        return Weights(str(cached), True, f"real weights of {name}, in the Hub's cache")
    if name == HUB_NAME:
        demo = _from_demo()
        if isinstance(demo, Path):
            return Weights(str(demo), True, "real weights, those of `make demo`")
        reason = demo
    else:
        reason = f"{name} is not on this machine; `hf download {name}` gets it"
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
    """Return the folder of SmolLM2-135M, made on first use, or the reason why it is unavailable."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, which transformers imports, logs to standard output
            return demo_model(cache_folder())
    except UserError as error:
        return str(error)


def find_data(config: Path) -> list[str]:
    """Return overrides that name the demo's data, generated from this Python's standard library."""
    train, held_out = build_demo_data(cache_folder())
    overrides = [f"dataset.path={train}"]
    if load_config(config).config.dataset.evaluation is not None:
        overrides.append(f"dataset.evaluation.path={held_out}")
    return overrides


def find_template(base_model: str) -> list[str]:
    """Return an override with Alpaca's form for a base model without a chat template (SmolLM2-135M, Llama-2-7b-hf).

    The data is conversations, which have no form without a template.
    """
    from trainer.model.base import load_tokenizer

    try:
        template = load_tokenizer(base_model, ModelSection()).chat_template
    except UserError:
        return []  # the run itself reports it, and the other tiers continue
    return [] if template else [f"dataset.chat_template={ALPACA}"]


def cpu_time(settings: RunConfig, base_model: str) -> float:
    """Estimate the run's seconds on this CPU, to a factor of two.

    start + 2 x PASSES x parameters x tokens / measured operations per second.
    """
    from trainer.model.base import build_empty_model, load_model_config

    training = settings.training
    model = build_empty_model(load_model_config(base_model, settings.model), settings.model)
    model.tie_weights()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = settings.dataset.max_length * training.batch_size * training.gradient_accumulation_steps
    return CPU_START_S + 2 * PASSES * parameters * tokens * (training.max_steps or 0) / _products_per_second()


def _products_per_second() -> float:
    """Measure the FLOP/s of a matrix product of size 1024 on this CPU, with the threads of a rank."""
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
