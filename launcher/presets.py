"""`zerolora init`: write a configuration to start from, with a comment above each setting."""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import BaseModel

from launcher.module import exec_module
from trainer.config import RunConfig, UserError
from trainer.config.errors import find_nearest, to_text
from trainer.config.yaml_core import parse_scalar
from trainer.contract.home import ZEROLORA_HOME
from trainer.contract.output_files import check_settings_file

CONFIGS = ZEROLORA_HOME / "configs"
HUB_TIMEOUT_S = 4.0
# Preset name -> file in configs/.
_FILE_PRESETS = """llama2-7b llama3.1-8b mistral-7b phi3-mini qwen2.5-7b granite-4.0-h-1b qwen3-30b-a3b gpt-oss-20b
    mixtral-8x7b scu-kl dpo kto reward vision sdxl sd3.5-medium flux-dev flux2-klein"""
PRESETS = {name: name for name in _FILE_PRESETS.split()} | {
    "olmoe": "olmoe-1b-7b", "tinyllama": "tinyllama-1.1b", "smollm2": "smollm2-135m",
}  # fmt: skip
# Model name prefix -> preset, if the prefix differs from the preset's name.
NAME_PREFIXES = {
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3.5": "sd3.5-medium",
    "flux.1": "flux-dev",
    "flux1": "flux-dev",
    "flux.2-klein": "flux2-klein",
}
IMAGE_PRESETS = tuple(NAME_PREFIXES.values())
FALLBACK_PRESET = "tinyllama"  # for models without their own preset
DEFAULT_PRESET = "smollm2"  # without --model; trains on a laptop
MODEL_FILES = ("config.json", "model_index.json")
SETTING_PATTERN = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*)")
WIDTH = 110


def init(
    preset: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PRESETS)}; default: the closest to --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or Hub ID of the model; default: the preset's.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder or Hub ID of the training data.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: NAME.yaml in the current directory.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs to configure for; default: all visible.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of each GPU, such as 24GiB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented configuration to start from, fitted to the model and data if both can be read."""
    should_tailor = gpus is not None or gpu_memory is not None or (preset is None and _is_readable(model, data))
    is_guessed = preset is None and model is not None
    preset = preset or (find_nearest_preset(model) if model else DEFAULT_PRESET)
    if model and (folder := Path(model).expanduser()).is_dir():
        found = next((name for name in MODEL_FILES if (folder / name).is_file()), None)
        if found is None:
            raise UserError(f"--model {model}: the folder has no {MODEL_FILES[0]}; use the folder of a saved model")
        is_pipeline = found != MODEL_FILES[0]
        if preset in PRESETS and is_pipeline != (preset in IMAGE_PRESETS):
            fix = f"use --preset {IMAGE_PRESETS[0] if is_pipeline else FALLBACK_PRESET}"
            raise UserError(f"--preset {preset}: does not fit --model {model}, which has a {found}; {fix}")
    elif model and "://" in model:
        raise UserError(f"--model {model}: is a URL; use OWNER/NAME on the Hub, such as Qwen/Qwen2.5-7B, or a folder")
    if model and Path(model).is_file() and Path(model).suffix != ".safetensors":
        raise UserError(f"--model {model}: is a file; use the folder of a saved model")
    name = _build_file_name(model) if model else preset
    output = output or Path(f"{name}.yaml")
    text = render_preset(preset, output, model=model, data=data)
    try:
        if output.exists() or should_tailor:
            check_settings_file(output, f"--output {output}", force=force)
        if should_tailor:
            _tailor(model, data, gpus, gpu_memory, output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); use another file") from None
    first_step = _describe_first_step(model, data, preset, is_guessed=is_guessed)
    commands = "".join(f"\n  zerolora {name} {shlex.quote(str(output))}" for name in ("validate", "inspect", "train"))
    typer.echo(f"wrote {output}; {first_step}{commands}")


def _describe_first_step(model: str | None, data: str | None, preset: str, *, is_guessed: bool) -> str:
    if model and model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        return f"{to_text(model)} does not exist; correct base_model or put the model there, then"
    if data is None:
        return "set dataset.path, then"
    path, suffixes = Path(data).expanduser(), (".jsonl", ".json", ".parquet", ".csv", ".txt")
    is_hub_id = path.suffix not in suffixes and not path.parent.is_dir()  # or a URL
    if not is_hub_id and not path.exists():
        return f"{to_text(data)} does not exist yet; write the data there, then"
    problem = f"warning: {to_text(model)} could not be read, locally or on the Hub, so " if is_guessed else ""
    fix = "; check the model's name and the connection and run init again, or adjust the settings" if is_guessed else ""
    return f"{problem}the file has the settings of the preset {preset}{fix}; next:"


def _tailor(model: str | None, data: str | None, gpus: int | None, gpu_memory: str | None, output: Path) -> NoReturn:
    if not (model and data):
        option = f"--gpus {gpus}" if gpus is not None else f"--gpu-memory {gpu_memory}"
        raise UserError(f"{option}: has no effect without a model and data; add --model and --data")
    typer.echo("examining the model and the data")
    arguments = ["--model", model, "--data", data, "--output", str(output)]
    arguments += ["--gpus", str(gpus)] if gpus is not None else []
    arguments += ["--gpu-memory", gpu_memory] if gpu_memory else []
    exec_module("trainer.commands.tailor", [*arguments, "--output-dir", f"runs/{_build_file_name(output.stem)}"])


def _is_readable(model: str | None, data: str | None) -> bool:
    """Return whether the data is on this machine, and the model's configuration is here or on the Hub."""
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, HTTPError
    from huggingface_hub.utils import build_hf_headers

    if not (model and data and Path(data).expanduser().exists()):
        return False
    if (Path(model).expanduser() / MODEL_FILES[0]).is_file():
        return True
    with suppress(HFValidationError, HTTPError, OSError):
        if isinstance(try_to_load_from_cache(model, MODEL_FILES[0]), str):
            return True
        address = hf_hub_url(model, MODEL_FILES[0])
        return bool(get_session().head(address, headers=build_hf_headers(), timeout=HUB_TIMEOUT_S).status_code < 400)
    return False


def find_nearest_preset(model: str) -> str:
    """Return the preset named after the model or its family, or FALLBACK_PRESET if there is none."""
    normalized = _normalize(_build_file_name(model))
    prefixes = {**{name: name for name in PRESETS}, **NAME_PREFIXES}
    matches = (preset for name, preset in prefixes.items() if normalized.startswith(_normalize(name)))
    return next(matches, FALLBACK_PRESET)


def render_preset(preset: str, output: Path, *, model: str | None = None, data: str | None = None) -> str:
    """Return the preset's YAML with the values and a comment per setting. Raises UserError for an unknown preset."""
    if preset not in PRESETS:
        close = find_nearest(preset, PRESETS)
        hint = f"did you mean {close}?" if close else f"use one of {', '.join(PRESETS)}"
        raise UserError(f"--preset {preset}: no such preset; {hint}")
    path = CONFIGS / f"{PRESETS[preset]}.yaml"
    if not path.is_file():
        raise UserError(f"--preset {preset}: {path} is missing; clone the repository, which has all presets")
    rest = path.read_text(encoding="utf-8").splitlines()[1:]
    lines = [f"# zerolora train {shlex.quote(str(output))}", "# All other settings: zerolora config --schema"]
    values = {"output_dir": f"runs/{_build_file_name(output.stem)}"} | ({"dataset.path": data} if data else {})
    own_comments = list(takewhile(lambda line: line.startswith("#"), rest))  # about the preset's own model
    if model:
        values["base_model"] = model
    lines += ["#", f"# {model}, with the settings of the preset {preset}."] if model else own_comments
    return "\n".join([*lines, "", *_add_comments(rest[len(own_comments) :], values)]) + "\n"


def _add_comments(lines: list[str], values: Mapping[str, str]) -> list[str]:
    commented: list[str] = []
    descriptions = _collect_descriptions(RunConfig)
    section = ""
    for line in lines:
        setting = SETTING_PATTERN.fullmatch(line)
        if setting:
            section = section if setting["indent"] else ""
            name = f"{section}{setting['name']}"
            if not setting["value"]:
                section = f"{name}."
            # The description is omitted if the line has its own comment.
            if "#" not in setting["value"]:
                mark = f"{setting['indent']}# "
                commented += textwrap.wrap(descriptions[name], WIDTH, initial_indent=mark, subsequent_indent=mark)
            if name in values:
                _, mark, comment = line.partition("  #")
                is_plain = re.fullmatch(r"[\w./~@+-]+", values[name]) and parse_scalar(values[name]) == values[name]
                text = values[name] if is_plain else json.dumps(values[name], ensure_ascii=False)
                line = f"{setting['indent']}{setting['name']}: {text}{mark}{comment}"
        commented.append(line)
    return commented


def _build_file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name.rstrip("/").rpartition("/")[2]).strip("-.").lower() or "model"


def _normalize(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _collect_descriptions(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    descriptions: dict[str, str] = {}
    for name, field in section.model_fields.items():
        kind, text = field.annotation, field.description
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            text = kind.__doc__
            descriptions |= _collect_descriptions(kind, f"{prefix}{name}.")
        descriptions[prefix + name] = " ".join((text or "").split())
    return descriptions
