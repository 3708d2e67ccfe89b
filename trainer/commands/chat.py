"""`zerolora chat RUN`: a conversation with a trained adapter, its answers shown as they come."""

import argparse
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from trainer.checkpoint.finished_run import find_run, quiet_libraries, run_command, saved_tokenizer
from trainer.commands.generate import Sampling, continued, load_to_answer, prompts_on_stdin, readable
from trainer.commands.image_adapter import DRAWN_BY_DIFFUSERS, refuse_images
from trainer.config import CommandParser, UserError
from trainer.model.answers import conversation_ids

OVER = "/new"


def converse(model: Any, tokenizer: Any, sampling: Sampling, system: str | None) -> None:
    """Answer each line of standard input as a turn of one conversation; `/new` begins another one."""
    first = [{"role": "system", "content": system}] if system is not None else []
    turns = list(first)
    for line in prompts_on_stdin(sys.stdin.isatty()):
        if line == OVER:
            turns = list(first)
            continue
        turns.append({"role": "user", "content": readable(line)})
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        rows = [conversation_ids(tokenizer, turns)]
        try:
            [answer] = continued(model, tokenizer, rows, sampling, streamer=streamer)
        except KeyboardInterrupt:
            return
        turns.append({"role": "assistant", "content": answer})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora chat", description=f"Talk with a trained adapter; {OVER} starts over, Ctrl-D ends it."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run, or a checkpoint in it")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="longest answer (512)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest token (0.7)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="draw from the likeliest P only (0.95)")
    parser.add_argument("--system", metavar="TEXT", help="system turn (dataset.system_prompt of the run)")
    parser.add_argument("--base-model", metavar="MODEL", help="where the base model is now, if it was moved")
    return parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> None:
    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p)
    sampling.check()
    run = find_run(arguments.run, arguments.base_model)
    refuse_images(run, DRAWN_BY_DIFFUSERS)
    tokenizer = saved_tokenizer(run)
    if not tokenizer.chat_template:
        raise UserError(f"{arguments.run}: its tokenizer has no chat template to talk by; use zerolora generate")
    model = load_to_answer(run, tokenizer, both=False)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    system = run.config.dataset.system_prompt if arguments.system is None else arguments.system or None
    converse(model, tokenizer, sampling, system)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    quiet_libraries()
    arguments = _parse(argv)
    return run_command(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
