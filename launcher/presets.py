"""`zerolora init`: a configuration to start from, every setting with its meaning above it."""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import BaseModel

from launcher.become import become_module
from trainer.config import RunConfig, UserError
from trainer.config.errors import nearest
from trainer.config.yaml_core import plain
from trainer.contract.default_ranks import visible_gpus
from trainer.contract.home import HOME

CONFIGS = HOME / "configs"
# What people type -> the file in configs/.
_RENAMED = {"olmoe": "olmoe-1b-7b", "tinyllama": "tinyllama-1.1b", "smollm2": "smollm2-135m"}
PRESETS = {
    name: _RENAMED.get(name, name)
    for name in (
        *("llama2-7b", "llama3.1-8b", "mistral-7b", "phi3-mini", "qwen2.5-7b", "granite-4.0-h-1b", "qwen3-30b-a3b"),
        *("gpt-oss-20b", "mixtral-8x7b", "olmoe", "tinyllama", "smollm2", "scu-kl"),
        *("sdxl", "sd3.5-medium", "flux-dev", "flux2-klein"),
    )
}
# Beginnings of model names that differ from the name of their preset.
CALLED = {
    "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3.5": "sd3.5-medium",
    "flux.1": "flux-dev",
    "flux1": "flux-dev",
    "flux.2-klein": "flux2-klein",
}
# For a model that no preset is made for: settings that fit most, and a model that runs on a laptop if none is named.
FOR_ANY_MODEL, FOR_NO_MODEL = "tinyllama", "smollm2"
SETTING = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*)")
WIDTH = 110


def init(
    preset: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PRESETS)}; default: the one nearest to --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name of the model, instead of the preset's.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder or hub name of the data to train on.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write; default: NAME.yaml in this folder.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Look at the data and make the file for so many GPUs, each setting with its reason."),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="With --gpus: of each, such as 24GiB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    preset = preset or (nearest_preset(model) if model else FOR_NO_MODEL)
    name = _short(model) if model else preset
    output = output or Path(f"{name}.yaml")
    text = preset_text(preset, output, model=model, data=data)
    try:
        if output.exists() and not force:
            raise UserError(f"--output {output}: is there already; name another file, or add --force")
        if gpus is not None or gpu_memory is not None:
            _tailor(model, data, gpus, gpu_memory, output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
    typed = shlex.quote(str(output))
    first = "now" if data else "set dataset.path, then"
    typer.echo(f"{output}: {first}\n  zerolora validate {typed}\n  zerolora train {typed}")


def _tailor(model: str | None, data: str | None, gpus: int | None, gpu_memory: str | None, output: Path) -> NoReturn:
    """Go on as the program that looks at the model and the data, which takes torch."""
    if not (model and data):
        raise UserError("--gpus: the file is made for a model and data; name both with --model and --data")
    words = ["--model", model, "--data", data, "--gpus", str(gpus or len(visible_gpus()) or 1), "--output", str(output)]
    words += ["--gpu-memory", gpu_memory] if gpu_memory else []
    become_module("trainer.commands.tailor", [*words, "--output-dir", f"runs/{_short(model)}"])


def nearest_preset(model: str) -> str:
    """The preset made for this model or one of its family, by its name; one that fits most models if there is none."""
    letters = _letters(_short(model))
    called = {**{name: name for name in PRESETS}, **CALLED}
    return next((preset for name, preset in called.items() if letters.startswith(_letters(name))), FOR_ANY_MODEL)


def preset_text(preset: str, output: Path, *, model: str | None = None, data: str | None = None) -> str:
    """The preset's file with `output` in its first line, its meaning above each setting, and the model and data given.

    Raises UserError for a name that is none.
    """
    if preset not in PRESETS:
        close = nearest(preset, PRESETS)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(PRESETS)}"
        raise UserError(f"--preset {preset}: no such preset; {hint}")
    path = CONFIGS / f"{PRESETS[preset]}.yaml"
    if not path.is_file():
        raise UserError(f"--preset {preset}: {path} is not there; presets come with a checkout of zerolora")
    rest = path.read_text(encoding="utf-8").splitlines()[1:]
    lines = [f"# zerolora train {shlex.quote(str(output))}", "# All other settings: zerolora config --schema"]
    given = {"dataset.path": data} if data else {}
    if model:
        given |= {"base_model": model, "output_dir": f"runs/{_short(model)}"}
        while rest[0].startswith("#"):
            rest.pop(0)  # what is said of the preset's own model
        lines += ["#", f"# {model}, with the settings of the preset {preset}."]
    else:
        while rest[0].startswith("#"):
            lines.append(rest.pop(0))
    return "\n".join([*lines, "", *_commented(rest, given)]) + "\n"


def _commented(lines: list[str], given: Mapping[str, str]) -> list[str]:
    """A file's settings with their meanings above them, and with the values that are given."""
    commented: list[str] = []
    meanings = _meanings(RunConfig)
    section = ""
    for line in lines:
        setting = SETTING.fullmatch(line)
        if setting:
            section = section if setting["indent"] else ""
            name = f"{section}{setting['name']}"
            if not setting["value"]:
                section = f"{name}."
            # A line that says something of its own keeps it.
            if "#" not in setting["value"]:
                mark = f"{setting['indent']}# "
                commented += textwrap.wrap(meanings[name], WIDTH, initial_indent=mark, subsequent_indent=mark)
            if name in given:
                _, comment, said = line.partition("  #")
                line = f"{setting['indent']}{setting['name']}: {_scalar(given[name])}{comment}{said}"
        commented.append(line)
    return commented


def _scalar(text: str) -> str:
    """Text as one writes it in YAML: in quotes only if it needs them."""
    return text if re.fullmatch(r"[\w./~@+-]+", text) and plain(text) == text else json.dumps(text, ensure_ascii=False)


def _short(model: str) -> str:
    """`Qwen2.5-7B-Instruct` of `Qwen/Qwen2.5-7B-Instruct` or of a folder, as a file's name."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2]).strip("-.").lower() or "model"


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _meanings(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Dotted name -> documentation, of settings and of sections."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        kind, text = field.annotation, field.description
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            text = kind.__doc__
            found |= _meanings(kind, f"{prefix}{name}.")
        found[prefix + name] = " ".join((text or "").split())
    return found
