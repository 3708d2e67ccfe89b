"""Masks: what is trained, decoded, for chat templates of every kind; and that it never is anything else."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny import CHATML
from trainer.config import UserError
from trainer.data.conversations import ChatEncoder, load_chat_template
from trainer.data.formats import RecordFormat
from trainer.data.records import Conversation, PlainText, read_record
from trainer.data.samples import Sample
from trainer.data.tokens import EncodedDocument, encode_spans, encode_texts

# A system prompt of its own, written with the first turn.
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking of all but the last answer dropped, an empty one put into the last; tool results under one heading.
THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<result>' + message.content + '</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# No header before an answer, the system prompt inside the first question, texts trimmed, roles that must alternate.
BRACKETS = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' }}{% if loop.first and system is defined %}"
    "{{ '<<' + system + '>> ' }}{% endif %}{{ message['content'] | trim }}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# Headers in plain words, and no generation prompt.
WORDS = (
    "{% for m in messages %}{{ {'user': 'Q', 'assistant': 'A', 'system': 'S'}[m.role] }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
)
# The author's own marks, which stop short of the end of the turn, and leave the thinking out.
MARKED = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{{ message.reasoning_content or '' }}
        {%- generation -%}
            {{ message.content | trim }}
        {%- endgeneration -%}
        {{ '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
SKIPPING = (
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Everything gathered first and written after the loop.
GATHERED = (
    "{% set ns = namespace(text='') %}{% for message in messages %}"
    "{% set ns.text = ns.text + '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' %}{% endfor %}"
    "{{ ns.text }}"
)
END = "<|im_end|>"


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    turn("system", "Be terse."),
    turn("user", "  red cat? "),
    turn("assistant", " blue (dog)\n"),
    turn("user", "assistant"),
    turn("assistant", "nine 🤗"),
]


def trained_texts(tokenizer: PreTrainedTokenizerBase, encoded: EncodedDocument | Sample) -> list[str]:
    """The trained tokens, run by run, as text."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(encoded.input_ids, encoded.loss_weights, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: list[dict[str, Any]],
    *,
    train_on: tuple[str, ...] = ("assistant",),
    system_prompt: str | None = None,
    **turns: Any,
) -> EncodedDocument:
    encoder = ChatEncoder(tokenizer, template, train_on, system_prompt)
    return encoder.encode([Conversation(messages, **turns)], ["record 1"])[0]


ANSWERS: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "ChatML": (CHATML, TALK, [f" blue (dog)\n{END}", f"nine 🤗{END}"]),
    "default system prompt": (DEFAULT_SYSTEM, TALK[1:], [f" blue (dog)\n{END}", f"nine 🤗{END}"]),
    "default system prompt, answer first": (DEFAULT_SYSTEM, [TALK[2], TALK[1]], [f" blue (dog)\n{END}"]),
    "thinking dropped but for the last": (
        THINKING,
        [
            TALK[1],
            turn("assistant", "<think>Hm.</think>\n\nblue"),
            TALK[3],
            turn("assistant", "nine", reasoning_content="So."),
        ],
        [f"blue{END}", f"<think>\nSo.\n</think>\n\nnine{END}"],
    ),
    "trimmed, no header": (BRACKETS, TALK, [f" blue (dog){END}", f" nine 🤗{END}"]),
    "plain headers, no generation prompt": (WORDS, TALK, [f" blue (dog)\n{END}", f" nine 🤗{END}"]),
    "marked by its author": (
        MARKED,
        [TALK[1], turn("assistant", " blue ", reasoning_content="Hm."), TALK[3], TALK[4]],
        [f"blue{END}", f"nine 🤗{END}"],
    ),
    "turns skipped in the loop": (SKIPPING, TALK, [f" blue (dog)\n{END}", f"nine 🤗{END}"]),
    "two answers in a row": (
        CHATML,
        [TALK[1], turn("assistant", "one"), turn("assistant", "two")],
        [f"one{END}", f"two{END}"],
    ),
    "an answer that quotes the template": (
        CHATML,
        [TALK[1], turn("assistant", "say <|im_start|>assistant\nhi")],
        [f"say <|im_start|>assistant\nhi{END}"],
    ),
    "the same text in question and answer": (CHATML, [turn("user", "nine"), turn("assistant", "nine")], [f"nine{END}"]),
    "an empty answer": (CHATML, [TALK[1], turn("assistant", "")], [END]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_alone_are_trained_through_their_end(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    template, messages, expected = ANSWERS[name]
    encoded = encode(tokenizer, template, messages)
    assert trained_texts(tokenizer, encoded) == expected
    plain = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert encoded.input_ids == tokenizer(plain, add_special_tokens=False)["input_ids"]


def test_tool_calls_are_trained_and_their_results_are_not(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    messages = [
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "9"),
        turn("tool", "10"),
        turn("assistant", "nine"),
    ]
    encoded = encode(tokenizer, THINKING, messages, tools=[{"type": "function", "function": {"name": "weather"}}])
    thought = "<think>\n\n</think>\n\n"
    assert trained_texts(tokenizer, encoded) == [
        f'{thought}<tool_call>weather{{"city": "Ulm"}}</tool_call>{END}',
        f"{thought}nine{END}",
    ]


ROLES = {
    ("user",): [f"red cat? {END}", f"assistant{END}"],
    ("system",): [f"Be terse.{END}"],
    ("system", "assistant"): [f"Be terse.{END}", f" blue (dog)\n{END}", f"nine 🤗{END}"],
}


@pytest.mark.parametrize("train_on", ROLES)
def test_any_roles_by_choice(tokenizer: PreTrainedTokenizerBase, train_on: tuple[str, ...]) -> None:
    assert trained_texts(tokenizer, encode(tokenizer, CHATML, TALK, train_on=train_on)) == ROLES[train_on]


def test_all_trains_every_token(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in (CHATML, GATHERED):
        assert all(encode(tokenizer, template, TALK, train_on=("all",)).loss_weights)


def test_silent_turns_are_read_but_not_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode(tokenizer, CHATML, TALK, weights={2: 0.0})
    assert trained_texts(tokenizer, encoded) == [f"nine 🤗{END}"]


def test_system_prompt_only_where_there_is_none(tokenizer: PreTrainedTokenizerBase) -> None:
    with_own = tokenizer.decode(encode(tokenizer, CHATML, TALK, system_prompt="Be kind.").input_ids)
    without = encode(tokenizer, CHATML, TALK[1:], system_prompt="Be kind.", weights={1: 0.0})
    assert "Be kind." not in with_own
    assert tokenizer.decode(without.input_ids).startswith(f"<|im_start|>system\nBe kind.{END}\n<|im_start|>user")
    assert trained_texts(tokenizer, without) == [f"nine 🤗{END}"]  # numbers of turns do not move


def test_many_at_once_are_each_as_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = ChatEncoder(tokenizer, CHATML, ("assistant",), None)
    chats = [Conversation(TALK), Conversation(TALK[1:3]), Conversation([]), Conversation(TALK[1:])]
    together = encoder.encode(chats, ["r"] * 4)
    assert together == [encoder.encode([chat], ["r"])[0] for chat in chats]
    assert together[2] == EncodedDocument([], [])


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, BRACKETS])
def test_offsets_without_white_space(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """GPT-2's tokenizers report a token without the space or line break that is in it."""
    trimming = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert trimming("a  b", return_offsets_mapping=True)["offset_mapping"][1] == (2, 2)  # a lone space without extent
    assert encode(trimming, template, TALK) == encode(tokenizer, template, TALK)


def test_a_tokenizer_that_changes_the_text() -> None:
    """Lower case, words of its vocabulary only, Metaspace: decoded tokens differ from the text and are right."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(["the cat runs"], trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))
    small = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    encoded = encode_texts(small, [PlainText("The dog", " RUNS the cat")], frozenset({"assistant"}), ["r"])[0]
    assert small.convert_ids_to_tokens(encoded.input_ids) == ["▁the", "<unk>", "▁runs", "▁the", "▁cat", "</s>"]
    assert encoded.loss_weights == [False, False, True, True, True, True]


TEXTS = {
    "completion after a colon": (PlainText("Q: red?\nA:", " blue"), [f" blue{END}"]),
    # The tokenizer joins the prompt's last space with the completion's first word.
    "completion after a space": (PlainText("Q: red?\nA: ", "blue"), [f" blue{END}"]),
    "text alone": (PlainText("", "red blue"), [f"red blue{END}"]),
    "empty completion": (PlainText("Q", ""), []),
    "nothing": (PlainText("", ""), []),
}


@pytest.mark.parametrize("name", TEXTS)
def test_completions_are_trained_and_ended(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    text, expected = TEXTS[name]
    encoded = encode_texts(tokenizer, [text], frozenset({"assistant"}), ["r"])[0]
    assert trained_texts(tokenizer, encoded) == expected
    assert tokenizer.decode(encoded.input_ids).removesuffix(END) == text.prompt + text.completion


def test_prompts_are_trained_by_choice(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode_texts(tokenizer, [PlainText("red", " blue")], frozenset({"user", "assistant"}), ["r"])[0]
    assert all(encoded.loss_weights)


def test_a_leading_token_where_the_tokenizer_puts_one(tokenizer: PreTrainedTokenizerBase) -> None:
    leading = AutoTokenizer.from_pretrained(tokenizer.name_or_path, bos_token="<|im_start|>")
    leading.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", leading.bos_token_id)]
    )
    encoded = encode_texts(leading, [PlainText("red", " blue")], frozenset({"assistant"}), ["r"])[0]
    assert leading.decode(encoded.input_ids) == f"<|im_start|>red blue{END}"
    assert trained_texts(leading, encoded) == [f" blue{END}"]


def test_offsets_that_lie_are_found_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """A normaliser that prepends text without saying so shifts what the offsets call the answer."""

    class Shifted:
        backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, text: str | list[str], **options: Any) -> Any:
            batch = tokenizer(text, **options)
            if "offset_mapping" in batch:
                shifted = [[(start + 3, end + 3) for start, end in row] for row in batch["offset_mapping"]]
                return {"input_ids": batch["input_ids"], "offset_mapping": shifted}
            return batch

    with pytest.raises(UserError, match=r"record 1: the trained tokens decode to .* offsets are wrong"):
        encode_spans(Shifted(), ["red blue nine"], [[(9, 13, 1.0)]], ["record 1"])


REFUSED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "gathered after the loop": (
        GATHERED,
        TALK,
        {},
        ("record 1", "omits assistant turn 3", "{% generation %}"),
    ),
    "roles that do not alternate": (BRACKETS, TALK[2:], {}, ("record 1", "roles must alternate")),
    "tool calls in a template without": (
        CHATML,
        [TALK[1], turn("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])],
        {},
        ("record 1", "tool calls", "dataset.chat_template"),
    ),
    "tools in a template without": (CHATML, TALK, {"tools": [{"name": "f"}]}, ("record 1", "has tools")),
    "a template that is none": ("{% for message in %}", TALK, {}, ("dataset.chat_template", "cannot be rendered")),
    "a loop that is too long": (
        "{% for i in range(10**12) %}x{% endfor %}",
        TALK,
        {},
        ("cannot be rendered", "Range too big"),
    ),
    "a text that is too long": ("{{ 'x' * 10**12 }}", TALK, {}, ("dataset.chat_template", "cannot be rendered")),
    "a division by nothing": ("{{ 1 / 0 }}", TALK, {}, ("cannot be rendered (division by zero)",)),
    "an escape from the sandbox": ("{{ ''.__class__.__mro__ }}", TALK, {}, ("cannot be rendered", "unsafe")),
    "a template that lets turns out": (
        CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}").replace(
            "<|im_start|>{{ message['role'] }}",
            "{% if message['role'] == 'assistant' %}{% continue %}{% endif %}{{ message['role'] }}",
        ),
        TALK,
        {},
        ("record 1", "omits assistant turn 3"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_line(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    template, messages, turns, needles = REFUSED[name]
    with pytest.raises(UserError) as caught:
        encode(tokenizer, template, messages, **turns)
    assert [needle for needle in needles if needle not in str(caught.value)] == []


def test_a_template_that_does_not_compile_names_itself(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot be rendered .*set another"):
        encode(tokenizer, "{% for %}", TALK)
    nested = "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"cannot be rendered \(rendering takes more than 3 seconds\)"):
        encode(tokenizer, nested, TALK)
    monkeypatch.setattr("trainer.data.chat_template.MAX_RENDER_SECONDS", 60)  # a busy machine fills memory slowly
    doubled = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    with pytest.raises(UserError, match=r"cannot be rendered \(rendering takes more than 1 GiB of memory\)"):
        encode(tokenizer, doubled, TALK)
    with pytest.raises(UserError, match="chat_template: empty"):
        load_chat_template(tokenizer, " ")


def test_template_from_the_configuration(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(WORDS)
    assert load_chat_template(tokenizer, None) == CHATML
    assert load_chat_template(tokenizer, WORDS) == WORDS
    assert load_chat_template(tokenizer, str(file)) == WORDS
    with pytest.raises(UserError, match=r"chat_template=missing.jinja: neither a template nor an existing file"):
        load_chat_template(tokenizer, "missing.jinja")
    with pytest.raises(UserError, match=r"chat_template=.*: is a folder; use a file"):
        load_chat_template(tokenizer, str(tmp_path))
    (tmp_path / "chat.json").write_text('{"chat_template": "x"}')
    with pytest.raises(UserError, match=r"chat.json: the file is JSON, not a template; write a template into it"):
        load_chat_template(tokenizer, str(tmp_path / "chat.json"))
    file.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"chat_template=.*: line 1: byte 0xe9 is not UTF-8; save it as UTF-8 text"):
        load_chat_template(tokenizer, str(file))


# Turns with fields that are not read.


@pytest.mark.parametrize(
    ("turn", "unread"),
    [
        ({"tool_calls": [{"name": "f", "parameters": {"city": "Ulm"}}]}, ("messages.tool_calls.parameters",)),
        ({"tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "input": {"a": 1}}, "index": 0}]},
         ("messages.tool_calls.function.input",)),
        ({"content": [{"type": "text", "text": "red", "cited": "page 3"}]}, ("messages.content.cited",)),
        ({"content": [{"type": "output_text", "text": "red"}, "blue"]}, ()),
    ],
)  # fmt: skip
def test_fields_of_calls_and_parts_that_are_not_used_are_reported(
    turn: dict[str, Any], unread: tuple[str, ...]
) -> None:
    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **turn}]}
    example = read_record(record, RecordFormat("messages", {"messages": "messages"}), "record 1")
    assert example.unused_fields == unread


@pytest.mark.parametrize("kind", ["image", "image_url", "thinking", "input_audio"])
def test_a_part_that_is_not_text_is_refused_although_it_has_a_text(kind: str) -> None:
    problem = (
        "has 0 images, but 1 placeholder" if "image" in kind else "turn 1: content has parts that are neither text nor"
    )
    record = {"messages": [{"role": "user", "content": [{"type": kind, "text": ""}, {"type": "text", "text": "hi"}]}]}
    with pytest.raises(UserError, match=problem):
        read_record(record, RecordFormat("messages", {"messages": "messages"}), "record 1")
