"""`zerolora generate RUN [PROMPT ...]`: generate responses with a trained adapter, and with its base model."""

import argparse
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import islice
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import TextStreamer

from trainer.checkpoint.finished_run import (
    BASE_MODEL_HELP,
    FinishedRun,
    add_run_arguments,
    choose_default_device,
    find_prompt_format,
    find_run,
    load_saved_tokenizer,
    load_trained_model,
    silence_libraries,
)
from trainer.config import CommandParser, DatasetSection, UserError, reports_errors
from trainer.config.command_line import parse_positive_int
from trainer.config.errors import sanitize, to_text
from trainer.config.messages import suggest_override
from trainer.data.image_parts import IMAGE_MARKER
from trainer.data.prompt_files import Prompt, format_prompt, read_prompts
from trainer.data.records import Conversation
from trainer.data.vision import PromptImages
from trainer.model.answers import GREEDY, check_prompt_length, encode_prompt, generate_texts
from trainer.model.base import get_context_length
from trainer.model.image_reader import load_image_reader, read_prompt_images
from trainer.patches.fused_lora import fuse_layers
from trainer.patches.loss_head import to_device
from trainer.setup.kinds import check_task_supports


class AnswerStreamer(TextStreamer):
    """Prints an answer as it is generated, without terminal control sequences."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(sanitize(text), stream_end)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy decoding."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"--temperature={self.temperature:g}: must be a finite number, 0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p={self.top_p:g}: must be above 0 and at most 1")

    def build_arguments(self) -> dict[str, Any]:
        """Return arguments for `generate` that override the base model's generation settings."""
        if self.temperature == 0:
            return GREEDY
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


def generate_answers(
    model: Any,
    tokenizer: Any,
    rows: Sequence[torch.Tensor],
    sampling: Sampling,
    *,
    with_adapter: bool = True,
    streamer: Any = None,
    images: PromptImages | None = None,
) -> list[str]:
    """Generate continuations for rows of token IDs [1, T] in one batch, padded on the left.

    Rows must be shorter than the model's context. `streamer` receives tokens as they are generated; `streamer` and
    `images` require a single row.
    """
    options = {"streamer": streamer, **sampling.build_arguments()}
    if images is not None:
        base = model.get_base_model()
        accepted = inspect.signature(base.forward).parameters
        options |= to_device(images.build_inputs(rows[0], accepted, base.dtype), model.device)
    prompts = [row[0].tolist() for row in rows]
    with nullcontext() if with_adapter else model.disable_adapter():
        texts = generate_texts(model, tokenizer, prompts, model.device, sampling.max_new_tokens, **options)
    return [text.strip() for text in texts]


def load_for_inference(run: FinishedRun, tokenizer: Any, *, with_base: bool) -> Any:
    """Load the trained model, and merge or fuse its adapter unless the base model is also needed (`with_base`)."""
    model = load_trained_model(run, tokenizer, choose_default_device())
    if with_base:
        return model
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if run.config.adapter == "lora" and not any(isinstance(layer, ParamWrapper) for layer in layers):
        model.merge_adapter()
    elif model.device.type == "cuda" and run.config.ops.backend != "peft":
        tokens = torch.full((1, 8), tokenizer.pad_token_id, device=model.device)
        with torch.no_grad():
            fuse_layers(model, "auto", forward=lambda: model(input_ids=tokens, use_cache=False))
    return model


def encode_prompts(
    prompts: Iterable[Prompt], encode: Callable[[Prompt], torch.Tensor], failed: list[str], origins: Sequence[str] = ()
) -> Iterator[tuple[Prompt, torch.Tensor]]:
    """Yield each prompt with its token IDs [1, T].

    A prompt that cannot be encoded is printed to stderr with its entry in `origins`, and appended to `failed`. If it is
    the only prompt in a list, raises UserError instead.
    """
    for index, prompt in enumerate(map(replace_invalid_unicode, prompts)):
        try:
            yield prompt, encode(prompt)
        except UserError as error:
            origin = "".join(f"{origin}: " for origin in origins[index : index + 1] if origin)
            if isinstance(prompts, list) and len(prompts) == 1:
                raise UserError(f"{origin}{error}") from None
            failed.append(format_prompt(prompt))
            print(f"error: {origin}{to_text(format_prompt(prompt))!r}: {error}", file=sys.stderr, flush=True)


def load_generation_inputs(
    arguments: argparse.Namespace, *, with_base: bool
) -> tuple[Any, Any, DatasetSection, str | None, PromptImages | None]:
    """Return the model, tokenizer, data settings, plain-text prompt format and images for the command's options.

    --system replaces the system prompt in the settings. Raises UserError for options that the run does not support.
    """
    run = find_run(arguments.run, arguments.base_model, allow_mismatch=arguments.allow_mismatch)
    check_task_supports(run, "generate")
    tokenizer = load_saved_tokenizer(run)
    prompt_format = find_prompt_format(run, tokenizer, raw=arguments.raw, chat=arguments.chat)
    section = run.config.dataset
    if arguments.system is not None:
        section = section.model_copy(update={"system_prompt": arguments.system or None})
    reader = load_image_reader(run.config.base_model, run.config.model, run.config.dataset, tokenizer)
    images = read_prompt_images(reader, arguments.image)
    if arguments.image and prompt_format is not None:
        raise UserError("--image: needs prompts in the chat template; add --chat")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # answers may contain characters that the terminal cannot show
    return load_for_inference(run, tokenizer, with_base=with_base), tokenizer, section, prompt_format, images


def print_answers(answers: dict[str, str], console: Console) -> None:
    if len(answers) == 1:
        answer = next(iter(answers.values()))
        # Bypass rich, which would wrap lines and interpret [brackets] as markup.
        console.file.write((sanitize(answer) if console.is_terminal else answer) + "\n")
        console.file.flush()
        return
    table = Table(*(Column(name, ratio=1, overflow="fold") for name in answers), expand=True)
    table.add_row(*(Text(sanitize(text)) for text in answers.values()))
    console.print(table)


def read_stdin_prompts(terminal: bool) -> Iterator[str]:
    """Yield prompts from standard input until its end or Ctrl-C. Raises UserError if a file or pipe has no prompt."""
    found = terminal
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    while True:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line, found = "", True
        if not line:
            if terminal:
                print(file=sys.stderr)
            if not found:
                raise UserError("standard input: has no prompt; pipe one per line, or pass PROMPT to `generate`")
            return
        if prompt := line.removeprefix("\ufeff").strip():
            found = True
            yield prompt


def replace_invalid_unicode(prompt: Prompt) -> Prompt:
    """Replace lone surrogates and bytes that are not UTF-8 with U+FFFD, and print a note to stderr."""
    if isinstance(prompt, Conversation):
        messages = [turn | {"content": replace_invalid_unicode(turn["content"])} for turn in prompt.messages]
        return Conversation(messages, prompt.tools)
    if isinstance(prompt, list):
        return [turn | {"content": replace_invalid_unicode(turn["content"])} for turn in prompt]
    text = re.sub("[\ud800-\udfff]", "\ufffd", prompt)
    if text != prompt:
        print(f"note: {to_text(text)!r} is not valid Unicode; invalid parts are replaced with \ufffd", file=sys.stderr)
    return text


def add_answer_options(parser: argparse.ArgumentParser, default: Sampling) -> None:
    help_ = f"maximum length of an answer in tokens (default: {default.max_new_tokens})"
    longest = default.max_new_tokens
    parser.add_argument("--max-new-tokens", type=parse_positive_int, default=longest, metavar="N", help=help_)
    help_ = f"sampling temperature; 0: greedy (default: {default.temperature:g})"
    parser.add_argument("--temperature", type=float, default=default.temperature, metavar="T", help=help_)
    help_ = f"nucleus sampling: sample from the most likely tokens with total probability P (default: {default.top_p})"
    parser.add_argument("--top-p", type=float, default=default.top_p, metavar="P", help=help_)
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the run's dataset.system_prompt)")
    help_ = "image shown before the prompt, for vision-language models; may be repeated"
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help=help_)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--raw", action="store_true", help="continue prompts as typed: no template, no system prompt")
    group.add_argument("--chat", action="store_true", help="use the chat template, even if trained on plain text")


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="zerolora generate",
        description="Generate responses with a trained adapter; without a PROMPT, every line of standard input is one.",
    )
    add_run_arguments(parser, BASE_MODEL_HELP)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="user messages, each a separate conversation")
    add_answer_options(parser, Sampling())
    parser.add_argument("--base", action="store_true", help="also show the base model's answer")
    parser.add_argument("--prompts", metavar="FILE", dest="file", help="data file of prompts: `prompt` or `messages`")
    parser.add_argument("--batch-size", type=parse_positive_int, default=1, metavar="N", help="batch size (default: 1)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.image and (arguments.batch_size > 1 or arguments.file is not None or arguments.raw):
        raise UserError("--image: needs PROMPT arguments, one at a time; remove --batch-size, --prompts and --raw")
    if arguments.raw and arguments.system is not None:
        raise UserError("--system: has no effect with --raw, which continues prompts as typed; remove one of them")
    if not all(prompt.strip() for prompt in arguments.prompts):
        raise UserError("PROMPT: empty; write a question, or omit PROMPT to read standard input")
    for prompt in arguments.prompts:
        if re.fullmatch(r"[a-z_.]+=\S+", prompt) and suggest_override(prompt):
            raise UserError(f"{prompt}: settings cannot be changed here; remove it, or pipe it as a prompt")
    arguments.sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p)
    if arguments.temperature == 0 and arguments.top_p < 1:
        raise UserError(f"--top-p={arguments.top_p}: has no effect at --temperature 0; remove one of them")
    return arguments


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    arguments = _parse_arguments(argv)
    silence_libraries()
    origins = [""] * len(arguments.prompts)
    listed = [*arguments.prompts, *(read_prompts(arguments.file, "--prompts", origins) if arguments.file else ())]
    model, tokenizer, section, prompt_format, images = load_generation_inputs(arguments, with_base=arguments.base)
    prompts = listed if listed or arguments.file is not None else read_stdin_prompts(sys.stdin.isatty())
    failed: list[str] = []

    def encode(prompt: Prompt) -> torch.Tensor:
        if arguments.image:
            prompt = [{"role": "user", "content": IMAGE_MARKER * len(arguments.image) + str(prompt)}]
        row = encode_prompt(tokenizer, section, prompt, prompt_format, images)
        check_prompt_length(row, get_context_length(model.config))
        return row

    rows = encode_prompts(prompts, encode, failed, origins)
    console = Console()
    # Stream to a terminal; write complete answers to a pipe.
    is_streaming = arguments.batch_size == 1 and not arguments.base and sys.stdout.isatty()
    streamer = AnswerStreamer(tokenizer) if is_streaming else None
    names = {"base": False, "base + adapter": True} if arguments.base else {"adapter": True}
    answer = partial(generate_answers, model, tokenizer, sampling=arguments.sampling, streamer=streamer, images=images)
    while batch := list(islice(rows, arguments.batch_size)):
        if len(listed) > 1 and is_streaming:
            console.print(Text(f"> {sanitize(format_prompt(batch[0][0]))}", style="bold"), soft_wrap=True)
        try:
            tokens = [row for _, row in batch]
            answers = {name: answer(tokens, with_adapter=with_adapter) for name, with_adapter in names.items()}
        except KeyboardInterrupt:
            return
        if is_streaming:
            continue
        for index, (prompt, _) in enumerate(batch):
            if len(listed) > 1:
                console.print(Text(f"> {sanitize(format_prompt(prompt))}", style="bold"), soft_wrap=True)
            print_answers({name: texts[index] for name, texts in answers.items()}, console)
    if failed:
        were = "prompt was" if len(failed) == 1 else "prompts were"
        raise UserError(f"{len(failed)} {were} not answered; see above")
