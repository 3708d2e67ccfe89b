"""Find a source's local data files from its path, `data_files` and split."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.config import SourceSection, UserError
from trainer.config.errors import find_nearest, to_text
from trainer.config.files import UnreadableFileError, describe_broken_link, read_text
from trainer.config.paths import expand_path
from trainer.config.yaml_core import read_yaml
from trainer.data.text_files import get_data_suffix

_TABLES: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("source_files.yaml")).tree
READERS = {suffix: kind for kind, suffixes in _TABLES["kinds"].items() for suffix in suffixes.split()}
SPLIT_WORDS = {split: words.split() for split, words in _TABLES["splits"].items()}


def describe_source(source: SourceSection, label: str) -> str:
    """Return `SETTING=PATH` to begin an error message. `label` is a section, setting or command-line option."""
    return f"{label}{'.path' if label.startswith('dataset') else ''}={to_text(source.path)}"


def build_source(path: str, label: str, **settings: Any) -> SourceSection:
    try:
        # Set the path afterwards, because the constructor converts the name `none` to None.
        return SourceSection(**settings).model_copy(update={"path": expand_path(path)})
    except ValueError as error:
        raise UserError(f"{label}={to_text(path)}: {error}") from None


def read_template(configured: str) -> str:
    """Return the chat template in `dataset.chat_template`, or in the file at that path."""
    if "{" in configured:
        return configured
    if not configured.strip():
        raise UserError("dataset.chat_template: empty; write a template or the path to a file, or remove the setting")
    try:
        if (text := read_text(Path(configured).expanduser())).strip() and not configured.endswith(".json"):
            return text
        fix = "write a template into it, or remove the setting"
        problem = f"the file is {'JSON, not a template' if text.strip() else 'empty'}; {fix}"
    except FileNotFoundError:
        problem = "neither a template nor an existing file; write a template, or the path to a file"
    except UnreadableFileError as error:
        problem = f"{error.problem}; {error.fix}"
    raise UserError(f"dataset.chat_template={configured}: {problem}")


def find_data_files(source: SourceSection, path: Path, split: str, label: str) -> list[Path]:
    where = describe_source(source, label)
    kinds = ", ".join(READERS)
    if path.is_file():
        if source.data_files:
            raise UserError(f"{label}.data_files={to_text(source.data_files)}: {where} is a file; remove data_files")
        if get_data_suffix(path) not in READERS:
            suffix = path.suffix or "a file without a suffix"
            is_archive = suffix in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz", ".7z", ".rar", ".lz4")
            fix = "unpack it" if is_archive else f"use {kinds}, optionally gzipped (.gz)"
            raise UserError(f"{where}: {suffix} is not supported; {fix}")
        if split != "train" and _find_split(Path(path.name)) != _normalize_split(split):
            raise UserError(describe_missing_split(label, split, to_text(source.path)))
        return [path]
    try:
        files = [file for file in sorted(path.rglob("*")) if get_data_suffix(file) in READERS and not file.is_dir()]
        next(path.iterdir(), None)  # raises for an unreadable folder, which rglob skips silently
    except OSError as error:
        raise UserError(f"{where}: the folder cannot be read ({error.strerror}); fix its permissions") from None
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    # Skip a README next to the data.
    files = [file for file in files if get_data_suffix(file) != ".md"] or files
    if not files:
        raise UserError(f"{where}: the folder has no data files; add files that end in {kinds}")
    if source.data_files:
        return _check_one_kind(_select_named_files(source, path, files, label), where)
    by_split = {file: _find_split(file.relative_to(path)) for file in files}
    splits = {name for name in by_split.values() if name}
    if splits:
        files = [file for file in files if by_split[file] == _normalize_split(split)]
        if not files:
            raise UserError(
                f"{label}.split={split}: {source.path} has the splits {', '.join(sorted(splits))}; use one of them"
            )
    elif split != "train":
        raise UserError(describe_missing_split(label, split, to_text(source.path)))
    return _check_one_kind(files, where)


def describe_missing_split(label: str, split: str, path: str) -> str:
    fix = "remove the setting, select a part with train[:100], or set the path to the split's file"
    return f"{label}.split={split}: {path} has no such split; {fix}"


def _select_named_files(source: SourceSection, path: Path, files: list[Path], label: str) -> list[Path]:
    names = {str(file.relative_to(path)): file for file in files}
    selected: dict[str, Path] = {}
    for pattern in source.data_files:
        relative = pattern.removeprefix("./").removeprefix(f"{path}/")
        matches = {name: file for name, file in names.items() if fnmatch(name, relative)}
        if not matches:
            near = find_nearest(relative, names)
            hint = f"did you mean {near}?" if near else "use files of that folder, or remove the setting"
            problem = f"no such data file in {to_text(source.path)}; {hint}"
            raise UserError(f"{label}.data_files={to_text(pattern)}: {problem}")
        selected |= matches
    return list(selected.values())


def _check_one_kind(files: list[Path], where: str) -> list[Path]:
    for file in files:
        if not file.is_file():
            problem = describe_broken_link(file) or f"{file.name} is a pipe, socket or device"
            raise UserError(f"{where}: {problem}; replace or remove it")
    readers = sorted({READERS[get_data_suffix(file)] for file in files})
    if len(readers) > 1:
        raise UserError(f"{where}: has files of several kinds ({', '.join(readers)}); use one file, or dataset.mix")
    return files


def _normalize_split(split: str) -> str:
    return next((name for name, words in SPLIT_WORDS.items() if split in words), split)


def _find_split(path: Path) -> str | None:
    parts = [part.lower() for part in (*path.parts[:-1], path.name.split(".")[0])]
    for part in reversed(parts):
        words = part.replace("_", "-").replace(" ", "-").split("-")
        for split, names in SPLIT_WORDS.items():
            if words[0] in names or words[-1] in names:
                return split
    return None
