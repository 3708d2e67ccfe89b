"""`zerolora generate RUN [PROMPT ...]`: prompts answered by a trained adapter, and by its base beside it."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.checkpoint.finished_run import find_run, load_trained, quiet_libraries, run_device, saved_tokenizer
from trainer.config import CommandParser, UserError
from trainer.config.errors import shown
from trainer.model.answers import prompt_ids, stop_tokens
from trainer.model.base import context_length


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn: greedily at temperature 0."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """For `generate`; what the base's own generation settings say of sampling does not count."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, prompt: str, sampling: Sampling, *, system: str | None = None, with_adapter: bool = True
) -> str:
    """The answer to a user message through the chat template, or the continuation of a text if there is none.

    Raises UserError if the prompt leaves no room for an answer, or the chat template takes no system turn.
    """
    input_ids = prompt_ids(tokenizer, prompt, system).to(model.device)
    length = input_ids.shape[1]
    longest = context_length(model.config)
    if longest is not None and length >= longest:
        raise UserError(f"the prompt has {length} tokens, and the model was made for {longest}; shorten it")
    room = sampling.max_new_tokens if longest is None else min(sampling.max_new_tokens, longest - length)
    with nullcontext() if with_adapter else model.disable_adapter():
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=room,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=stop_tokens(model, tokenizer),
            **sampling.arguments(),
        )
    return str(tokenizer.decode(generated[0, length:], skip_special_tokens=True)).strip()


def show(answers: dict[str, str], console: Console) -> None:
    """One answer as plain text, for pipes; two of them beside each other."""
    if len(answers) == 1:
        # Written past rich, which would wrap lines and read [brackets] in the model's words as its own.
        console.file.write(next(iter(answers.values())) + "\n")
        console.file.flush()
        return
    table = Table(expand=True)
    for name in answers:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text(text) for text in answers.values()))
    console.print(table)


def _lines(terminal: bool) -> Iterator[str]:
    """Prompts from standard input until its end or Ctrl-C; each is a conversation of its own."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    while True:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            if terminal:
                print(file=sys.stderr)
            return
        if prompt := line.removeprefix("\ufeff").strip():
            yield prompt


def readable(prompt: str) -> str:
    """A prompt that a tokenizer takes: bytes that are not UTF-8 become the replacement character, with a note."""
    text = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if text != prompt:
        print(f"note: {shown(text)!r} is not UTF-8 text as given; its other bytes are read as \ufffd", file=sys.stderr)
    return text


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora generate",
        description="Answer prompts with a trained adapter; without a PROMPT, every line of standard input is one.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of the run, or a checkpoint in it")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="user messages, each a conversation of its own")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest P only (1.0)")
    parser.add_argument("--base", action="store_true", help="show the base model's answer beside")
    parser.add_argument("--system", metavar="TEXT", help="system turn (dataset.system_prompt of the run)")
    parser.add_argument("--base-model", metavar="MODEL", help="where the base model is now, if it was moved")
    arguments = parser.parse_intermixed_args(argv)
    for allowed, setting, value, range_ in (
        (arguments.max_new_tokens >= 1, "--max-new-tokens", arguments.max_new_tokens, "1 or more"),
        (arguments.temperature >= 0, "--temperature", arguments.temperature, "0 or more"),
        (0 < arguments.top_p <= 1, "--top-p", arguments.top_p, "above 0 and 1 at most"),
    ):
        if not allowed:
            raise UserError(f"{setting}={value}: must be {range_}")
    return arguments


def _run(arguments: argparse.Namespace) -> None:
    run = find_run(arguments.run, arguments.base_model)
    tokenizer = saved_tokenizer(run)
    model = load_trained(run, tokenizer, run_device())
    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes what an ASCII terminal cannot show
    system = run.config.dataset.system_prompt if arguments.system is None else arguments.system or None
    console = Console()
    terminal = sys.stdin.isatty()
    prompts: Iterable[str] = arguments.prompts or _lines(terminal)
    several = len(arguments.prompts) > 1
    for given in prompts:
        prompt = readable(given)
        names = {"base": False, "base + adapter": True} if arguments.base else {"adapter": True}
        try:
            answers = {
                name: answer(model, tokenizer, prompt, sampling, system=system, with_adapter=with_adapter)
                for name, with_adapter in names.items()
            }
        except KeyboardInterrupt:
            return
        if several:
            console.print(Text(f"> {prompt}", style="bold"), soft_wrap=True)
        show(answers, console)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on stderr."""
    quiet_libraries()
    try:
        _run(_parse(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
