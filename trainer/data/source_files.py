"""Local data files of a source, by its path, its `data_files` and its split."""

from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.config import SourceSection, UserError
from trainer.config.errors import shown
from trainer.config.files import UnreadableFile, read_text
from trainer.config.paths import expand_path
from trainer.config.yaml_core import read_yaml
from trainer.data.text_files import data_suffix

_TABLES: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("source_files.yaml")).tree
READERS = {suffix: kind for kind, suffixes in _TABLES["kinds"].items() for suffix in suffixes.split()}
SPLIT_WORDS = {split: words.split() for split, words in _TABLES["splits"].items()}


def describe_source(source: SourceSection, label: str) -> str:
    """Return the source as configured, for the beginning of a message; `label` may be an option or a setting."""
    return f"{label}{'.path' if label.startswith('dataset') else ''}={shown(source.path)}"


def build_source(path: str, label: str, **settings: Any) -> SourceSection:
    """Return the source at the path that an option or another setting gives; `label` names it in errors."""
    try:
        # Not through the constructor, in which the name `none` means no path.
        return SourceSection(**settings).model_copy(update={"path": expand_path(path)})
    except ValueError as error:
        raise UserError(f"{label}={shown(path)}: {error}") from None


def read_template(configured: str) -> str:
    """Return the template of dataset.chat_template: its text, or that of the file. Raises UserError if it has none."""
    if "{" in configured:
        return configured
    if not configured.strip():
        raise UserError("dataset.chat_template: empty; write a template or the path of a file, or remove the setting")
    try:
        if (text := read_text(Path(configured).expanduser())).strip():
            return text
        problem = "the file is empty; write a template into it, or remove the setting"
    except FileNotFoundError:
        problem = "neither a template nor an existing file; write a template, or the path of a file"
    except UnreadableFile as error:
        problem = f"{error.problem}; {error.fix}"
    raise UserError(f"dataset.chat_template={configured}: {problem}")


def find_data_files(source: SourceSection, local: Path, split: str, label: str) -> list[Path]:
    """Return the data files of a path: the file itself, or the folder's files of the split."""
    where = describe_source(source, label)
    kinds = ", ".join(READERS)
    if local.is_file():
        if source.data_files:
            raise UserError(f"{label}.data_files={shown(source.data_files)}: {where} is a file itself; remove one")
        if data_suffix(local) not in READERS:
            ending = "".join(local.suffixes[-1:]) or "a file without an ending"
            packed = ending in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz", ".7z", ".rar", ".lz4")
            advice = "; unpack it first" if packed else f"; known are {kinds}, each with .gz too"
            raise UserError(f"{where}: {ending} is not understood{advice}")
        if split != "train" and _find_split(Path(local.name)) != _split_word(split):
            raise UserError(no_such_split(label, split, shown(source.path)))
        return [local]
    try:
        files = [file for file in sorted(local.rglob("*")) if file.is_file() and data_suffix(file) in READERS]
        next(local.iterdir(), None)  # rglob silently skips an unreadable folder
    except OSError as error:
        raise UserError(f"{where}: the folder cannot be read ({error.strerror}); fix its permissions") from None
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(local).parts)]
    # A README next to the data is not data.
    files = [file for file in files if data_suffix(file) != ".md"] or files
    if not files:
        raise UserError(f"{where}: is a folder without data files; looked for {kinds}")
    if source.data_files:
        return _one_kind(_named_files(source, local, files, label), where)
    by_split = {file: _find_split(file.relative_to(local)) for file in files}
    splits = {name for name in by_split.values() if name}
    if splits:
        files = [file for file in files if by_split[file] == _split_word(split)]
        if not files:
            raise UserError(f"{label}.split={split}: {source.path} has the splits {', '.join(sorted(splits))}; use one")
    elif split != "train":
        raise UserError(no_such_split(label, split, shown(source.path)))
    return _one_kind(files, where)


def no_such_split(label: str, split: str, path: str) -> str:
    """Return the error for a missing split."""
    return (
        f"{label}.split={split}: {path} has no such split; remove the setting, write train[:100] for a part, "
        "or name the file that holds the split"
    )


def _named_files(source: SourceSection, local: Path, files: list[Path], label: str) -> list[Path]:
    chosen: list[Path] = []
    for pattern in source.data_files:
        wanted = pattern.removeprefix("./").removeprefix(f"{local}/")
        found = [file for file in files if fnmatch(str(file.relative_to(local)), wanted)]
        if not found:
            near = get_close_matches(wanted, [str(file.relative_to(local)) for file in files], n=1)
            hint = f"did you mean {near[0]}?" if near else "use files of that folder, or remove it"
            raise UserError(f"{label}.data_files={shown(pattern)}: no such data file in {shown(source.path)}; {hint}")
        chosen += [file for file in found if file not in chosen]
    return chosen


def _one_kind(files: list[Path], where: str) -> list[Path]:
    readers = sorted({READERS[data_suffix(file)] for file in files})
    if len(readers) > 1:
        raise UserError(f"{where}: files of several kinds ({', '.join(readers)}); use one file, or use dataset.mix")
    return files


def _split_word(split: str) -> str:
    """Return `validation` for dev and valid, else the split."""
    return next((name for name, words in SPLIT_WORDS.items() if split in words), split)


def _find_split(path: Path) -> str | None:
    """Return a file's split by its name or folder: train-00000-of-00002.parquet, validation/part.jsonl."""
    parts = [part.lower() for part in (*path.parts[:-1], path.name.split(".")[0])]
    for part in reversed(parts):
        words = part.replace("_", "-").replace(" ", "-").split("-")
        for split, names in SPLIT_WORDS.items():
            if words[0] in names or words[-1] in names:
                return split
    return None
