"""Build the Modelfile for a GGUF file in Ollama (https://github.com/ollama/ollama/blob/main/docs/modelfile.md).

Ollama formats prompts with a Go template. It is derived from the tokenizer's chat template by rendering conversations,
and used only if it renders the same text for other conversations.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError

from trainer.model.answers import find_end_of_turn

TEXTS = {"system": "SYSTEM-TEXT", "user": "QUESTION-TEXT", "assistant": "ANSWER-TEXT"}
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ChatParts:
    """Text that a chat template writes around each role's turns, and in place of a missing system turn."""

    affixes: dict[str, tuple[str, str]]
    without_system: str

    def render(self, messages: Messages) -> str:
        start = "" if messages[0]["role"] == "system" else self.without_system
        turns = [self.affixes[turn["role"]][0] + turn["content"] + self.affixes[turn["role"]][1] for turn in messages]
        return start + "".join(turns) + self.affixes["assistant"][0]

    def is_safe(self) -> bool:
        """Return whether Ollama would read all of the text literally, not as template or Modelfile syntax."""
        texts = [self.without_system, *(text for pair in self.affixes.values() for text in pair)]
        # A final brace would merge with the braces of the placeholder that follows.
        return is_unchanged_in_quotes("".join(texts)) and not any(
            "{{" in text or '"""' in text or text[-1:] == "{" for text in texts
        )

    def to_go_template(self) -> str:
        branches: list[str] = []
        for role, (before, after) in self.affixes.items():
            test = f'{{{{ if eq .Role "{role}" }}}}' if not branches else f'{{{{ else if eq .Role "{role}" }}}}'
            branches.append(f"{test}{before}{{{{ .Content }}}}{after}")
        turns = f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}"
        start = f"{{{{ if not .System }}}}{self.without_system}{{{{ end }}}}" if self.without_system else ""
        return start + turns + self.affixes["assistant"][0]


def is_unchanged_in_quotes(text: str) -> bool:
    """Return whether Ollama reads this text unchanged between triple quotes.

    Ollama drops unprintable characters (such as U+00A0), and triple quotes at the end of a line terminate the text.
    """
    return all(char.isprintable() or char in "\n\r\t" for char in text) and not re.search(r'"""[ \t]*[\r\n]', text)


def derive_chat_parts(tokenizer: Any, variables: Mapping[str, Any] | None = None) -> ChatParts | None:
    """Return the parts of the tokenizer's chat template; None if it is missing or does more than join turns.

    `variables` is `dataset.chat_template_kwargs`.
    """
    if not isinstance(tokenizer.chat_template, str):
        return None
    for roles in (("system", "user", "assistant"), ("user", "assistant")):
        try:
            parts = _derive_parts(partial(_render_chat, tokenizer, variables or {}), roles)
            prompt = partial(_render_chat, tokenizer, {**(variables or {}), "add_generation_prompt": True})
            matches = parts is not None and all(parts.render(chat) == prompt(chat) for chat in _build_test_chats(roles))
            return parts if parts is not None and matches and parts.is_safe() else None
        except (TemplateError, ValueError):
            continue  # some templates reject system turns
    return None


def _derive_parts(render: Callable[[Messages], str], roles: Sequence[str]) -> ChatParts | None:
    chat: Messages = []
    text, around = "", {}
    for role in roles:
        chat.append({"role": role, "content": TEXTS[role]})
        longer = render(chat)
        before, separator, after = longer.removeprefix(text).partition(TEXTS[role])
        if not separator or not longer.startswith(text):
            return None
        around[role] = (before, after)
        text = longer
    single = render([{"role": "user", "content": TEXTS["user"]}])
    turn = TEXTS["user"].join(around["user"])
    return ChatParts(around, single.removesuffix(turn)) if single.endswith(turn) else None


def _build_test_chats(roles: Sequence[str]) -> list[Messages]:
    first = [{"role": "user", "content": "One"}]
    more = [*first, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"}]
    system = [{"role": "system", "content": "Zero"}]
    return [first, more, *([system + first, system + more] if "system" in roles else [])]


def _render_chat(tokenizer: Any, variables: Mapping[str, Any], chat: Messages) -> str:
    """Render a chat, without the leading BOS token if llama.cpp adds it."""
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, **variables))
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(tokenizer.bos_token) if adds_bos else text


def _find_end_of_turn_text(tokenizer: Any) -> str | None:
    try:
        token = find_end_of_turn(tokenizer) if tokenizer.chat_template else None
    except (TemplateError, ValueError):
        return None
    return None if token is None else str(tokenizer.convert_ids_to_tokens(token))


def build_text_template(prompt_format: str) -> str | None:
    """Return the Go template of a plain-text prompt format; None if Ollama would change it.

    `prompt_format` has the placeholders `{system}` and `{prompt}` (see `records.find_prompt_format`); a system
    prompt is followed by an empty line.
    """
    if not is_unchanged_in_quotes(prompt_format) or "{{" in prompt_format:
        return None
    return prompt_format.format(system="{{ if .System }}{{ .System }}\n\n{{ end }}", prompt="{{ .Prompt }}")


def build_modelfile(
    gguf: str,
    tokenizer: Any,
    *,
    system_prompt: str | None,
    prompt_format: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the Modelfile for the file `gguf` in the same folder.

    `prompt_format` is the plain-text prompt format (see `records.find_prompt_format`); None for the tokenizer's chat
    template, rendered with `variables`.
    """
    lines = [f"FROM ./{gguf}"]
    parts = derive_chat_parts(tokenizer, variables) if prompt_format is None else None
    if prompt_format is not None:
        template = build_text_template(prompt_format)
        lines.append("# No TEMPLATE: Ollama would change it." if template is None else f'TEMPLATE """{template}"""')
    elif parts is None:
        lines.append("# No TEMPLATE: the chat template does more than join turns; Ollama guesses one from the GGUF.")
    else:
        lines.append(f'TEMPLATE """{parts.to_go_template()}"""')
    end = _find_end_of_turn_text(tokenizer) if prompt_format is None and parts is None else None
    after = parts.affixes["assistant"][1].strip() if parts else end
    stops = dict.fromkeys([tokenizer.eos_token, after])
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop and '"' not in stop]
    if system_prompt and is_unchanged_in_quotes(system_prompt):
        lines.append(f'SYSTEM """{system_prompt}"""')
    elif system_prompt:
        lines.append("# No SYSTEM: Ollama would change the system prompt (unprintable characters, or quotes).")
    return "\n".join(lines) + "\n"
