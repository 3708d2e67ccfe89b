"""`zerolora chat RUN`: chat with a trained adapter, with streamed answers."""

import re
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.checkpoint.finished_run import BASE_MODEL_HELP, add_run_arguments, silence_libraries
from trainer.commands.generate import (
    AnswerStreamer,
    Sampling,
    add_answer_options,
    generate_answers,
    load_generation_inputs,
    read_stdin_prompts,
    replace_invalid_unicode,
)
from trainer.config import CommandParser, DatasetSection, UserError, reports_errors
from trainer.data.image_parts import IMAGE_MARKER
from trainer.data.vision import PromptImages
from trainer.model.answers import check_prompt_length, encode_prompt
from trainer.model.base import get_context_length

HELP = """/new    start over
/help   this list; Ctrl-D ends the chat"""


@dataclass
class Conversation:
    """A conversation with a trained model, including turns that no longer fit in the context."""

    model: Any
    tokenizer: Any
    sampling: Sampling
    section: DatasetSection
    prompt_format: str | None
    """Format of plain-text prompts, which are answered independently; None for the chat template."""
    images: PromptImages | None = None
    """Images shown before the first turn."""
    turns: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Stream the answer to `question`. Raises UserError if the question alone does not fit in the context."""
        if self.images is not None and not self.turns:
            question = IMAGE_MARKER * len(self.images.stored) + question
        turns = [*self.turns, {"role": "user", "content": question}]
        row, images = self._encode_fitting_turns(turns)
        streamer = AnswerStreamer(self.tokenizer)
        [answer] = generate_answers(self.model, self.tokenizer, [row], self.sampling, streamer=streamer, images=images)
        self.turns = [*turns, {"role": "assistant", "content": answer}]

    def _encode_fitting_turns(self, turns: list[dict[str, Any]]) -> tuple[torch.Tensor, PromptImages | None]:
        """Return the token IDs [1, T] of the latest turns that leave room for an answer, and their images."""
        context_length = get_context_length(self.model.config) or sys.maxsize
        room = min(self.sampling.max_new_tokens, context_length // 4)  # a longer answer may be truncated
        recent = turns if self.prompt_format is None else turns[-1:]
        while True:
            prompt = recent if self.prompt_format is None else recent[-1]["content"]
            images = self.images if len(recent) == len(turns) else None
            row = encode_prompt(self.tokenizer, self.section, prompt, self.prompt_format, images)
            if row.shape[1] + room <= context_length or len(recent) == 1:
                break
            recent = recent[2:]
        check_prompt_length(row, context_length)
        if self.prompt_format is None and len(recent) < len(turns):
            print(f"note: the first {len(turns) - len(recent)} turns no longer fit in the context", file=sys.stderr)
        return row, images


def converse(conversation: Conversation) -> None:
    for line in read_stdin_prompts(sys.stdin.isatty()):
        try:
            if line == "/new":
                conversation.turns = []
            elif line == "/help":
                print(HELP, file=sys.stderr)
            elif re.fullmatch(r"/\w+", line):
                raise UserError(f"{line}: not a command; /help lists them")
            else:
                conversation.ask(str(replace_invalid_unicode(line)))
        except KeyboardInterrupt:
            return
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


@reports_errors()
def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="zerolora chat", description="Chat with a trained adapter; /help lists commands, Ctrl-D ends the chat."
    )
    add_run_arguments(parser, BASE_MODEL_HELP)
    add_answer_options(parser, Sampling(512, 0.7, 0.95))
    arguments = parser.parse_args(argv)
    silence_libraries()
    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_p)
    model, tokenizer, section, prompt_format, images = load_generation_inputs(arguments, with_base=False)
    if prompt_format is not None:
        print("note: trained on plain-text prompts, so each line is answered independently", file=sys.stderr)
    converse(Conversation(model, tokenizer, sampling, section, prompt_format, images))
