"""Roles other than the assistant's, trained by choice: their text and the end of the turn, to the token, no tag."""

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.tiny import CHATML, make_tokenizer
from tests.unit.test_data_chat import BRACKETS, THINKING, encode, trained_texts, turn
from trainer.config import UserError

# Results of tools in tags within a user's turn, the header written for the first of several only; as Hermes and Qwen.
HERMES = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Headers with a role of their own for results, which are written as JSON; as Llama 3.1.
LLAMA = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday.\\n' + (system or '') + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>ipython<|end|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- elif message.tool_calls %}
        {{- '<|start|>assistant<|end|>\\n\\n' + (message.tool_calls[0].function | tojson) + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""
# Tags that are tokens, the system prompt in the last question, results within an object; as Mistral.
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULTS] {"content": ' + message.content | string + ', "id": "' + message.tool_call_id + '"}[/RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS] [' + (message.tool_calls[0].function | tojson) + ']' + eos_token }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}]
# Texts that occur in the template as well: user, tool, "e" within <tool_response>.
TALK = [
    turn("system", "user"),
    turn("user", "user"),
    turn("assistant", "", tool_calls=CALL),
    turn("tool", 'e "nine"\nred', tool_call_id="a1"),
    turn("tool", "tool", tool_call_id="a2"),
    turn("assistant", "nine"),
]
END = "<|im_end|>"
EXPECTED: dict[tuple[str, str], list[str]] = {
    ("hermes", "tool"): ['e "nine"\nred', "tool", END],
    ("hermes", "user"): [f"user{END}"],
    ("hermes", "system"): [f"user{END}"],
    ("hermes, tags are tokens", "tool"): ['e "nine"\nred', "tool", END],
    ("llama", "tool"): ['e \\"nine\\"\\nred', "<|eot|>", "tool", "<|eot|>"],
    ("llama", "user"): ["user<|eot|>"],
    ("llama", "system"): ["user"],
    ("mistral", "tool"): ['e "nine"\nred', "tool"],
    ("mistral", "user"): ["user"],
    ("mistral", "system"): ["user"],
    ("thinking", "tool"): ['e "nine"\nred', "tool", END],
    ("thinking", "user"): [f"user{END}"],
}
TEMPLATES = {
    "hermes": (HERMES, []),
    "hermes, tags are tokens": (HERMES, ["<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>"]),
    "llama": (LLAMA, ["<|start|>", "<|end|>", "<|eot|>"]),
    "mistral": (MISTRAL, ["[INST]", "[/INST]", "[RESULTS]", "[/RESULTS]", "[CALLS]"]),
    "thinking": (THINKING, []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def tokenizer_with(folder: Any, added: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(added, special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(("name", "role"), EXPECTED)
def test_the_text_of_a_role_and_its_end(folder: Any, name: str, role: str) -> None:
    template, added = TEMPLATES[name]
    tokenizer = tokenizer_with(folder, added)
    encoded = encode(tokenizer, template, TALK, train_on=(role,))
    assert trained_texts(tokenizer, encoded) == EXPECTED[name, role]
    plain = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert encoded.input_ids == tokenizer(plain, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_several_roles_are_each_as_alone(folder: Any, name: str) -> None:
    template, added = TEMPLATES[name]
    tokenizer = tokenizer_with(folder, added)
    roles = ("assistant", "tool", "user", "system")
    alone = [encode(tokenizer, template, TALK, train_on=(role,)).loss_weights for role in roles]
    together = encode(tokenizer, template, TALK, train_on=roles).loss_weights
    assert together == [any(of_token) for of_token in zip(*alone, strict=True)]
    assert sum(together) == sum(map(sum, alone))  # no token is of two roles


def test_an_empty_text_trains_the_end_alone(folder: Any) -> None:
    tokenizer = tokenizer_with(folder, [])
    talk = [turn("user", ""), turn("assistant", "red"), turn("user", " \n")]
    assert trained_texts(tokenizer, encode(tokenizer, CHATML, talk, train_on=("user",))) == [END, END]


def test_white_space_around_a_text_is_the_templates(folder: Any) -> None:
    tokenizer = tokenizer_with(folder, [])
    talk = [turn("system", " be brief "), turn("user", " red "), turn("assistant", "blue")]
    assert trained_texts(tokenizer, encode(tokenizer, BRACKETS, talk, train_on=("user",))) == ["red"]
    assert trained_texts(tokenizer, encode(tokenizer, BRACKETS, talk, train_on=("system",))) == [" be brief"]


def test_a_template_that_asks_what_a_text_says_is_refused(folder: Any) -> None:
    tokenizer = tokenizer_with(folder, [])
    asking = CHATML.replace(
        "{{ message['content'] }}", "{{ message['content'] + ('!' if message['content'] == 'red' else '') }}"
    )
    with pytest.raises(UserError, match="record 1: cannot locate the turns"):
        encode(tokenizer, asking, [turn("user", "red"), turn("assistant", "x")], train_on=("user",))
