"""`zerolora init --preset NAME`: a configuration to start from, every setting with its meaning above it."""

import re
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from trainer.config import RunConfig, UserError
from trainer.config.errors import nearest

CONFIGS = Path(__file__).parent.parent / "configs"
# What people type -> the file in configs/.
PRESETS = {
    "llama2-7b": "llama2-7b",
    "llama3.1-8b": "llama3.1-8b",
    "mistral-7b": "mistral-7b",
    "phi3-mini": "phi3-mini",
    "qwen2.5-7b": "qwen2.5-7b",
    "granite-4.0-h-1b": "granite-4.0-h-1b",
    "tinyllama": "tinyllama-1.1b",
    "smollm2": "smollm2-135m",
}
SETTING = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*)")
WIDTH = 110


def init(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")],
    output: Annotated[Path | None, typer.Option(help="The file to write; default: NAME.yaml in this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    text = preset_text(preset, output := output or Path(f"{preset}.yaml"))
    if output.exists() and not force:
        raise UserError(f"--output {output}: is there already; name another file, or add --force")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
    typer.echo(f"{output}: set dataset.path, then\n  zerolora validate {output}\n  zerolora train {output}")


def preset_text(preset: str, output: Path) -> str:
    """The preset's file with `output` in its first line, and its meaning above each setting.

    Raises UserError for a name that is none.
    """
    if preset not in PRESETS:
        close = nearest(preset, PRESETS)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(PRESETS)}"
        raise UserError(f"--preset {preset}: no such preset; {hint}")
    path = CONFIGS / f"{PRESETS[preset]}.yaml"
    if not path.is_file():
        raise UserError(f"--preset {preset}: {path} is not there; presets come with a checkout of zerolora")
    _, *rest = path.read_text(encoding="utf-8").splitlines()
    lines = [f"# zerolora train {output}", "# All other settings and their defaults: zerolora config --schema"]
    meanings = _meanings(RunConfig)
    section = ""
    for line in rest:
        setting = SETTING.fullmatch(line)
        if setting:
            section = section if setting["indent"] else ""
            name = f"{section}{setting['name']}"
            if not setting["value"]:
                section = f"{name}."
            # A line that says something of its own keeps it.
            if "#" not in setting["value"]:
                mark = f"{setting['indent']}# "
                lines += textwrap.wrap(meanings[name], WIDTH, initial_indent=mark, subsequent_indent=mark)
        lines.append(line)
    return "\n".join(lines) + "\n"


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
