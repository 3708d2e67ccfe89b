"""`zerolora push RUN REPO`: upload adapter, tokenizer and model card to the Hugging Face Hub.

No uploaded file contains a local path: the run's configuration and logs are not uploaded, and the model card names
local models and data by the last part of their path.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from trainer.checkpoint.adapter_files import SETTINGS
from trainer.checkpoint.checkpoint_files import parse_step, reseal
from trainer.checkpoint.finished_run import ADAPTER_FILES, FinishedRun, add_run_arguments, find_run, silence_libraries
from trainer.commands.adapter_kinds import get_adapter_class
from trainer.config import CommandParser, UserError, reports_errors
from trainer.config.adapter_settings import read_adapter_settings
from trainer.config.errors import to_text
from trainer.contract.output_files import check_output_file
from trainer.monitor.metrics import Record, read_metrics
from trainer.monitor.report.model_card import CARD, get_public_name, is_on_hub, is_user_written_card
from trainer.setup.kinds import find_task_class

LOGIN = "run `hf auth login`, or set HF_TOKEN, with a token that has write access"


def stage_files(run: FinishedRun, repo: str, folder: Path) -> list[Path]:
    """Write all files of the upload to `folder`, and return their paths.

    Also saves the model card in the adapter's folder, unless that folder has a card written by the user.
    """
    for name in ADAPTER_FILES:
        shutil.copyfile(run.folder / name, folder / name)
    get_adapter_class(run).write_upload_files(run, folder)
    base = get_public_name(run.config.base_model)
    settings = read_adapter_settings(folder) | {"base_model_name_or_path": base}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    card = run.folder / CARD
    if not is_user_written_card(card):
        text = find_task_class(run).build_model_card(run.config, run.run_dir, read_records(run), repo)
        card.write_text(text, encoding="utf-8")
        reseal(run.folder, CARD)
    shutil.copyfile(card, folder / CARD)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_records(run: FinishedRun) -> list[Record]:
    """Return the run's metrics, up to the checkpoint's step if a checkpoint is uploaded."""
    try:
        records = read_metrics(run.run_dir)
    except UserError:
        return []  # the model card then has no results
    last = parse_step(run.folder.resolve()) if run.folder != run.run_dir else None
    return [record for record in records if last is None or (record["step"] or 0) <= last]


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Create the repository if necessary and commit `folder` to it. Return its URL.

    Raises UserError if the Hub is unreachable or rejects the upload; the message contains no part of the token.
    """
    disable_progress_bars()
    api = HfApi()
    try:
        # None keeps the visibility of an existing repository.
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload adapter with zerolora")
    except HfHubHTTPError as error:
        raise UserError(f"{repo}: {_explain_refusal(error.response.status_code)}") from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"{repo}: the Hub at {api.endpoint} cannot be reached ({type(error).__name__}); "
            "check the network, or try again later"
        ) from None
    return str(created)


def _explain_refusal(status: int) -> str:
    """Explain why the Hub rejected an upload, without quoting the response, which may contain the request."""
    reasons = {
        401: f"the Hub rejected the token; {LOGIN}",
        403: "the token has no write access there; use your own namespace, and a token with write access",
        404: "no such user or organization on the Hub; check the name before the slash",
    }
    return reasons.get(status, f"the Hub refused the upload (HTTP {status}); try again later")


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora push", description="Upload adapter, tokenizer and model card to the Hugging Face Hub."
    )
    add_run_arguments(parser, "the base model's Hub ID, if the run used a local folder")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created if missing")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="write the card and list the files, without uploading")
    arguments = parser.parse_args(argv)
    silence_libraries()
    repo = arguments.repo
    try:
        validate_repo_id(repo if "/" in repo else "")  # the card's code needs the owner
    except HFValidationError:
        rule = "use owner/name with letters, digits, - _ and ., at most 96 characters"
        raise UserError(f"REPO={to_text(repo)}: not a valid name; {rule}") from None
    base = arguments.base_model
    if base and not Path(base).expanduser().exists() and not is_on_hub(base):
        raise UserError(f"--base-model={base}: is neither a folder nor a Hub ID; pass OWNER/NAME, as on the Hub")
    run = find_run(arguments.run, arguments.base_model, needs_base=False, allow_mismatch=arguments.allow_mismatch)
    check_output_file(run.folder / CARD, str(run.folder / CARD))
    if not arguments.dry_run and get_token() is None:
        raise UserError(f"{repo}: not logged in to the Hub; {LOGIN}")
    if not arguments.dry_run and is_offline_mode():
        raise UserError(f"{repo}: HF_HUB_OFFLINE is set; unset it to upload")
    with tempfile.TemporaryDirectory(prefix="zerolora-push-") as temporary:
        folder = Path(temporary)
        files = stage_files(run, repo, folder)
        base = get_public_name(run.config.base_model)
        if not is_on_hub(base):
            print(f"note: {base} is a local model; pass its Hub ID with --base-model", file=sys.stderr)
        if arguments.dry_run:
            for file in files:
                print(f"{file.stat().st_size:>14,}  {file.relative_to(folder)}")
            print(f"card: {run.folder / CARD}; nothing was uploaded")
            return
        print(upload(folder, repo, private=arguments.private))
