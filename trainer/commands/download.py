"""`zerolora download MODEL`: what training needs of a model on the hub, into the hub's cache or a folder.

Pickled weights are left where they are: zerolora reads safetensors only. Without a network the one line that is said
names the `hf download` command to run where there is one.
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

from trainer.config import CommandParser, UserError

PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
# Folders hold the same weights again for other programs.
LEFT_OUT = ("*/*",)


def download(model: str, *, revision: str | None = None, folder: Path | None = None) -> Path:
    """Folder with the model's safetensors, configuration and tokenizer. Raises UserError if it cannot be had."""
    if Path(model).is_dir():
        raise UserError(f"{model}: is a folder of this machine already; give it to base_model")
    try:
        found = Path(
            snapshot_download(
                model,
                revision=revision,
                local_dir=folder,
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(LEFT_OUT),
            )
        )
    except HFValidationError:
        raise UserError(f"{model}: not a name on the hub; it is OWNER/NAME, such as Qwen/Qwen2.5-7B") from None
    except GatedRepoError:
        raise UserError(
            f"{model}: gated; accept its licence at https://huggingface.co/{model}, then run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{model}: has no revision {revision}; see its branches and tags on the hub") from None
    except RepositoryNotFoundError:
        raise UserError(f"{model}: not on the hub, or private; check the name, or run `hf auth login`") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HTTPError, HfHubHTTPError, OSError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
        raise UserError(
            f"{model}: the hub did not give it ({reason}); where there is a network run "
            f"`{hub_command(model, revision, folder or Path(model.rpartition('/')[2]))}`, copy that folder here and "
            "set base_model to it"
        ) from None
    if not any(found.glob("*.safetensors")):
        raise UserError(f"{model}: has no safetensors; only those are loaded, so convert it first")
    return found


def hub_command(model: str, revision: str | None, folder: Path) -> str:
    """The `hf download` command that takes the same files."""
    words = ["hf", "download", model, "--local-dir", str(folder)]
    words += ["--revision", revision] if revision else []
    # Each pattern after an option of its own: `--include a b` takes b for a file name.
    for option, patterns in (("--include", PATTERNS), ("--exclude", LEFT_OUT)):
        for pattern in patterns:
            words += [option, pattern]
    return shlex.join(words)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    parser = CommandParser(
        prog="zerolora download", description="Download a model's safetensors, configuration and tokenizer."
    )
    parser.add_argument("model", metavar="MODEL", help="its name on the Hugging Face hub, OWNER/NAME")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a folder (default: the hub's cache)")
    arguments = parser.parse_args(argv)
    try:
        folder = download(arguments.model, revision=arguments.revision, folder=arguments.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder} ({size / 2**30:.2f} GiB); train with base_model={arguments.output or arguments.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
