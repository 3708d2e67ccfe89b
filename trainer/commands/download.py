"""`zerolora download MODEL`: download what training needs of a model into the hub's cache or a folder.

Pickled weights are not downloaded, since zerolora reads safetensors only. Without a network, the error message contains
the `hf download` command to run on a machine that has one.
"""

import shlex
import sys
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from trainer.config import CommandParser, UserError, reports_errors

PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
# Subfolders hold the same weights for other programs.
EXCLUDED = ("*/*",)
REASONS = {
    HFValidationError: "not a name on the hub; it is OWNER/NAME, such as Qwen/Qwen2.5-7B",
    GatedRepoError: "gated; accept its licence at https://huggingface.co/{model}, then run `hf auth login`",
    RevisionNotFoundError: "has no revision {revision}; check its branches and tags on the hub",
    RepositoryNotFoundError: "not on the hub, or private; check the name, or run `hf auth login`",
}
"""A gated repository is also one that is not found."""


def download(model: str, *, revision: str | None = None, folder: Path | None = None) -> Path:
    """Download the model's safetensors, configuration and tokenizer; return the folder. Raises UserError."""
    if Path(model).is_dir():
        raise UserError(f"{model}: already a folder on this machine; set base_model to it")
    try:
        found = snapshot_download(
            model, revision=revision, local_dir=folder, allow_patterns=list(PATTERNS), ignore_patterns=list(EXCLUDED)
        )
    except (HFValidationError, GatedRepoError, RevisionNotFoundError, RepositoryNotFoundError) as error:
        reason = next(text for kind, text in REASONS.items() if isinstance(error, kind))
        raise UserError(f"{model}: {reason.format(model=model, revision=revision)}") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HTTPError, HfHubHTTPError, OSError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
        raise UserError(
            f"{model}: cannot be downloaded ({reason}); on a machine with a network run "
            f"`{hub_command(model, revision, folder or Path(model.rpartition('/')[2]))}`, copy that folder here and "
            "set base_model to it"
        ) from None
    if not any(Path(found).glob("*.safetensors")):
        raise UserError(f"{model}: has no safetensors; only those are loaded, so convert it first")
    return Path(found)


def hub_command(model: str, revision: str | None, folder: Path) -> str:
    """Return the `hf download` command for the same files."""
    words = ["hf", "download", model, "--local-dir", str(folder)]
    words += ["--revision", revision] if revision else []
    # One option per pattern: `--include a b` takes b for a file name.
    for option, patterns in (("--include", PATTERNS), ("--exclude", EXCLUDED)):
        for pattern in patterns:
            words += [option, pattern]
    return shlex.join(words)


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora download", description="Download a model's safetensors, configuration and tokenizer."
    )
    parser.add_argument("model", metavar="MODEL", help="its name on the Hugging Face hub, OWNER/NAME")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--output", type=Path, metavar="DIR", help="target folder (default: the hub's cache)")
    arguments = parser.parse_args(argv)
    folder = download(arguments.model, revision=arguments.revision, folder=arguments.output)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder} ({size / 2**30:.2f} GiB); train with base_model={arguments.output or arguments.model}")


if __name__ == "__main__":
    sys.exit(main())
