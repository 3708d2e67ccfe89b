"""Published chat templates: the model is trained on what it has to write, its end token included, and on nothing else.

`expected.json` says for each template and conversation which stretches that is, taken from the template by hand; None
where the template cannot write the conversation. A second test derives the answers from transformers alone: what
follows the generation prompt.
"""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import CALL, CONVERSATIONS, FOLDER, NAMES, TOOL, WEATHER, make_tokenizer, source, turn
from tests.tiny import CHATML
from tests.unit.test_data_chat import THINKING, trained_texts
from trainer.config import DatasetSection, UserError
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import DROPPED_REASONING, DROPPED_SYSTEM, ChatEncoder, load_chat_template, render_prompt
from trainer.data.formats import RecordFormat
from trainer.data.markers import TURN_KEY, mark_template, parse_markers
from trainer.data.records import Conversation, read_record
from trainer.data.tokens import NO_END_TOKEN, EncodedDocument
from trainer.model.answers import find_end_of_turn

TURNS = CONVERSATIONS["turns"]
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
CASES = [(name, talk) for name in NAMES for talk in CONVERSATIONS]
# Templates that iterate over parts of content: transformers passes on what it is given.
PARTS = {"idefics3", "smolvlm"}
ENDS_WITH_THE_NEXT_TURN = {"apertus", "glm-4.5", "glm-4.6", "glm-4.7", "vllm-chatml"}
NEVER_THROUGH_TRANSFORMERS = {("deepseek-r1-distill", "tools"), ("deepseek-r1-distill", "call")}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(source(name), EXPECTED[name]["eos"])


def tools_of(name: str, talk: str) -> list[dict[str, Any]] | None:
    return [TOOL] if talk in ("tools", "call") and "tools" in re.sub("tools?_", "", source(name)) else None


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **more: Any) -> EncodedDocument:
    tools, variables = more.pop("tools", None), more.pop("variables", {})
    encoder = ChatEncoder(tokenizer, tokenizer.chat_template, more.pop("train_on", ("assistant",)), None, variables)
    return encoder.encode([Conversation(messages, tools, **more)], ["record 1"])[0]


def test_every_template_has_expectations_and_a_source() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(EXPECTED) == NAMES and len(NAMES) >= 30
    assert [name for name in NAMES if f"`{name}`" not in readme] == []


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_what_the_model_writes_is_trained(name: str, talk: str) -> None:
    tokenizer, expected = tokenizer_of(name), EXPECTED[name][talk]
    if expected is None:
        with pytest.raises(UserError, match=r"record 1: has tool calls, .*dataset\.chat_template"):
            encode(tokenizer, CONVERSATIONS[talk])
        return
    encoded = encode(tokenizer, CONVERSATIONS[talk], tools=tools_of(name, talk))
    assert trained_texts(tokenizer, encoded) == expected
    assert bool(encoded.warnings) == (talk in EXPECTED[name]["lost"])


def in_form(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as the template wants it, for transformers."""
    if name in PARTS:
        return message | {"content": [{"type": "text", "text": message["content"]}]}
    return message


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_answers_are_what_follows_generation_prompts(name: str, talk: str) -> None:
    """Independently of markers: the conversation as transformers renders it, without the prompt of each answer."""
    if EXPECTED[name][talk] is None or (name, talk) in NEVER_THROUGH_TRANSFORMERS:
        return
    tokenizer, tools = tokenizer_of(name), tools_of(name, talk)
    messages = [in_form(name, message) for message in CONVERSATIONS[talk]]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index, answer in zip(answered, EXPECTED[name][talk], strict=True):
        before = messages[:index]
        prompt = tokenizer.apply_chat_template(before, tools=tools, tokenize=False, add_generation_prompt=True)
        is_last = index == len(messages) - 1
        if is_last and name in ENDS_WITH_THE_NEXT_TURN:
            answer = re.sub(r"(?:<\|user\|>|<\|observation\|>|<\|im_end\|>|<\|assistant_end\|>)$", "", answer)
        # Some prompts begin an answer with <think>, which the template does not write in the answer itself.
        starts = (
            prompt,
            re.sub(r"<think>(</think>)?$", r"\1", prompt),
            re.sub(r"<think>\n*(</think>)?$", "", prompt),
            prompt.removesuffix("<|assistant_start|>"),  # Apertus continues a turn after its tools
            prompt.replace("Be brief.\n\n", ""),  # Mistral leads with the system text only what is not yet answered
        )
        rest = whole[len(next(start for start in starts if whole.startswith(start))) :]
        assert rest.startswith(answer)
        assert not is_last or rest[len(answer) :].strip() in ("", tokenizer.eos_token)


def numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {TURN_KEY: index} for index, message in enumerate(messages)]


@pytest.mark.parametrize(("name", "talk"), CASES)
def test_markers_change_nothing(name: str, talk: str) -> None:
    if EXPECTED[name][talk] is None:
        return
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[talk]
    template = ChatTemplate(tokenizer, tokenizer.chat_template, {})
    plain = template.render(messages, tools_of(name, talk))
    for texts in (True, False):
        assert template.render_marked(numbered(messages), tools_of(name, talk), mark_texts=texts).text == plain


PIECES = st.sampled_from(
    [
        *("{", "}", "{{ '{' }}", " \n", "\n", "  ", "a\\n", "'", '"', "{% raw %}{{ x }} {%- endraw %}"),
        *("{# a #}", "{#- b -#}\n", "{%- if true %} y {% endif -%}", "\n  {%- set z = 1 %}\n"),
        *("{{ m.role }}", "{{- m.content }}", "{{ m.content -}}", "{% for c in 'ab' %}{{ c }}{% endfor %}"),
        *("{%- for k, v in {'a': 1}.items() -%} {{ k }}\n{%- endfor %}", "\t{%+ if false %}{% endif %}"),
        "{% macro f(namespace) %}{% for c in namespace %}{{ c }}{% endfor %}{% endmacro %}{{ f('no') }}",
        "{% set t %}{% for c in '' %}{% endfor %}{% endset %}{{ '!' if t | trim else '?' }}",
    ]
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(before=st.lists(PIECES, max_size=3), body=st.lists(PIECES, max_size=6), after=st.lists(PIECES, max_size=3))
def test_markers_change_nothing_in_generated_templates(before: list[str], body: list[str], after: list[str]) -> None:
    def outside(pieces: list[str]) -> str:
        return "".join(piece for piece in pieces if "m." not in piece)

    template = f"{outside(before)}{{% for m in messages %}}{''.join(body)}{{% endfor %}}{outside(after)}"
    tokenizer = make_tokenizer(CHATML, "<|im_end|>")
    messages = [turn("user", "red"), turn("assistant", "blue")]
    try:
        plain = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except TemplateSyntaxError:  # two pieces make a tag
        return
    marked = tokenizer.apply_chat_template(numbered(messages), chat_template=mark_template(template), tokenize=False)
    assert parse_markers(marked).text == plain


WORDS = st.text("abcdefgh", min_size=5, max_size=9)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(["qwen3", "qwen3.5", "gpt-oss", "mistral-nemo", "smolvlm", "glm-4.6", "phi-3", "gemma-4-v5"]),
    texts=st.lists(st.tuples(WORDS, WORDS, st.one_of(st.none(), WORDS)), min_size=1, max_size=4),
    system=st.one_of(st.none(), WORDS),
    inline=st.booleans(),
)
def test_all_text_is_trained_masked_or_reported(
    name: str, texts: list[tuple[str, str, str | None]], system: str | None, inline: bool
) -> None:
    messages = [turn("system", f"s-{system}")] if system else []
    for question, answer, thought in texts:
        messages.append(turn("user", f"q-{question}"))
        if thought and inline:
            messages.append(turn("assistant", f"<think>\nt-{thought}\n</think>\n\na-{answer}"))
        else:
            messages.append(
                turn("assistant", f"a-{answer}", **({"reasoning_content": f"t-{thought}"} if thought else {}))
            )
    tokenizer = tokenizer_of(name)
    encoded = encode(tokenizer, messages)
    trained, text = "\n".join(trained_texts(tokenizer, encoded)), tokenizer.decode(encoded.input_ids)
    for question, answer, thought in texts:
        assert f"q-{question}" in text and f"q-{question}" not in trained and f"a-{answer}" in trained
        assert not thought or f"t-{thought}" in trained or DROPPED_REASONING in encoded.warnings
    assert not system or (f"s-{system}" in text and f"s-{system}" not in trained) or DROPPED_SYSTEM in encoded.warnings
    assert text.count(tokenizer.eos_token) == 0 or trained  # an end is never all that is left
    assert NO_END_TOKEN not in encoded.warnings


@pytest.mark.parametrize("name", NAMES)
def test_content_in_parts_is_trained_as_text(name: str) -> None:
    messages = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in TURNS]
    example = read_record({"messages": messages}, RecordFormat("messages", {"messages": "messages"}), "record 1")
    tokenizer = tokenizer_of(name)
    assert isinstance(example, Conversation)
    assert trained_texts(tokenizer, encode(tokenizer, example.messages)) == EXPECTED[name]["turns"]


THOUGHT = turn("assistant", "Blue.", reasoning_content="Hm.")
USED = turn("assistant", "", tool_calls=[CALL])
# Template, conversation, and what is trained of it.
UNUSUAL: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "prompt after questions only": (
        CHATML.replace("if add_generation_prompt", "if add_generation_prompt and messages[-1].role == 'user'"),
        [*TURNS[:2], turn("tool", "Dry."), turn("assistant", "Ten.")],
        ["Blue.<|im_end|>", "Ten.<|im_end|>"],
    ),
    "prompt within the loop": (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
        "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n<think>\n{% else %}<|im_end|>{% endif %}"
        "{% else %}<|im_start|>assistant\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        [TURNS[0], THOUGHT],
        ["Hm.</think>Blue.<|im_end|>"],
    ),
    "prompt that continues a header in words": (
        "{% for m in messages %}{{ m.role }}\nsays: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\nsays: <think>{% endif %}",
        TURNS[:2],
        ["Blue.<|im_end|>"],
    ),
    "content in parts only": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p['text'] + '' }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        TURNS[:2],
        ["Blue.<|im_end|>"],
    ),
    "ends in tags that are not special tokens": (
        "{% for m in messages %}{{ '<tool_response>' if m.role == 'user' else '<tool_call>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<tool_call>{% endif %}",
        TURNS,
        ["Blue.<tool_response>", "<Ten.<tool_response>"],
    ),
    "white space before the header, a tag after it": (
        "{% for m in messages %}{{ '\n<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}<tool_call>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n<think>' }}{% endif %}",
        TURNS,
        ["<tool_call>Blue.<|im_end|>", "<tool_call><Ten.<|im_end|>"],
    ),
    "ends of turns that are not special tokens": (
        "{% for m in messages %}<tool_call>{{ m.role }}\n{{ m.content }}</tool_call>{% endfor %}"
        "{% if add_generation_prompt %}<tool_call>assistant\n{% endif %}",
        TURNS,
        ["Blue.</tool_call>", "<Ten.</tool_call>"],
    ),
    "results within the turn": (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | tojson }}"
        "{% for r in messages if r.role == 'tool' %}<|im_result|>{{ r.content }}{% endfor %}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        [turn("user", "Rain?"), USED, turn("tool", "Dry."), turn("assistant", "No.")],
        ['weather{"city": "Ulm"}', "No.<|im_end|>"],
    ),
    "marks around the header as well": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n<think>"
        "{{ m.reasoning_content }}</think>{{ m.content }}<|im_end|>{% endgeneration %}{% else %}<|im_start|>user\n"
        "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}",
        [TURNS[0], THOUGHT, *TURNS[2:]],
        ["Hm.</think>Blue.<|im_end|>", "</think><Ten.<|im_end|>"],
    ),
    "results that name their call": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}"
        "{% for a in messages if a.tool_calls %}{{ a.tool_calls[0].function.name }}: {% endfor %}{% endif %}"
        "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        [turn("user", "Rain?"), USED, turn("tool", "Dry."), turn("assistant", "No.")],
        ['{"city": "Ulm"}<|im_end|>', "No.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_only_answers_are_trained_in_unusual_templates(case: str) -> None:
    template, messages, expected = UNUSUAL[case]
    tokenizer = make_tokenizer(template, "<|im_end|>")
    assert trained_texts(tokenizer, encode(tokenizer, messages)) == expected


def test_records_do_not_depend_on_those_before_them() -> None:
    """Prompts are remembered for speed; one that depends on the question is not taken for another."""
    asks = "{% if '/quiet' in messages[ASKED].content %}<quiet>{% endif %}"
    in_turn = "{% if message.role == 'assistant' %}" + asks.replace("ASKED", "loop.index0 - 1") + "{% endif %}"
    template = CHATML.replace("{{ message['content'] }}", in_turn + "{{ message['content'] }}").replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n" + asks.replace("ASKED", "-1")
    )
    tokenizer = make_tokenizer(template, "<|im_end|>")
    encoder = ChatEncoder(tokenizer, template, ("assistant",), None)
    talks = [Conversation([turn("user", text), turn("assistant", "Blue.")]) for text in ("Red?", "Red? /quiet", "Red?")]
    for document in encoder.encode(talks, ["record"] * 3):
        assert trained_texts(tokenizer, document) == ["Blue.<|im_end|>"]


def test_template_variables_reach_training_and_generation() -> None:
    tokenizer = tokenizer_of("qwen3")
    question, answer = turn("user", "Red?"), turn("assistant", "Blue.")
    quiet = {"enable_thinking": False}
    assert trained_texts(tokenizer, encode(tokenizer, [question, answer], variables=quiet)) == ["Blue.<|im_end|>"]
    section = DatasetSection(chat_template_kwargs=quiet, system_prompt="Be brief.")
    prompt = render_prompt(tokenizer, section, [question])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(("name", "problem"), [("enable_thinkin", "does not use it"), ("tools", "set by the trainer")])
def test_refuses_template_variables_without_effect(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"dataset\.chat_template_kwargs\.{name}=true: .*{problem}"):
        encode(tokenizer_of("qwen3"), CONVERSATIONS["turns"], variables={name: True})


def test_a_run_of_answers_ends_where_the_next_turn_begins() -> None:
    """GLM-4 writes no end of turn: the tag of the next one stops the generation."""
    tokenizer = tokenizer_of("glm-4.5")
    messages = [*CONVERSATIONS["tools"], turn("user", "Red?")]
    assert trained_texts(tokenizer, encode(tokenizer, messages, tools=[TOOL]))[-1].endswith("No.<|user|>")
    without = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "</s>")
    assert encode(without, CONVERSATIONS["turns"]).warnings == (NO_END_TOKEN,)


@pytest.mark.parametrize(("name", "end"), [("glm-4.5", "<|user|>"), ("phi-3", "<|end|>"), ("gpt-oss", "<|end|>")])
def test_generation_stops_where_training_ends_answers(name: str, end: str) -> None:
    tokenizer = tokenizer_of(name)
    assert find_end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_text_that_a_template_does_not_write() -> None:
    silent = CHATML.replace("{{ message['content'] }}", "{{ message['content'] if message['role'] != ROLE }}")
    for role, lost in (("system", (DROPPED_SYSTEM,)), ("user", None), ("assistant", None)):
        tokenizer = make_tokenizer(silent.replace("ROLE", repr(role)), "<|im_end|>")
        messages = [turn("system", "Be brief."), *CONVERSATIONS["turns"]]
        if lost:
            assert encode(tokenizer, messages).warnings == lost
            continue
        with pytest.raises(UserError, match=rf"record 1: the chat template omits {role} turn"):
            encode(tokenizer, messages)


def test_an_answer_after_results_begins_where_the_results_end() -> None:
    """Gemma 4 adds no generation prompt there: the model continues in the turn of its call."""
    messages = [*CONVERSATIONS["tools"][:3], turn("assistant", "No.", reasoning_content="So.")]
    tokenizer = tokenizer_of("gemma-4-v5")
    trained = trained_texts(tokenizer, encode(tokenizer, messages, tools=[TOOL]))
    assert trained[-1] == "<|channel>thought\nSo.\n<channel|>No.<turn|>"


def test_calls_of_one_turn_are_all_written_or_the_record_is_refused() -> None:
    other = {**CALL, "id": "call67890", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    messages = [turn("user", "Rain?"), turn("assistant", "", tool_calls=[CALL, other])]
    tokenizer = tokenizer_of("qwen3")
    [trained] = trained_texts(tokenizer, encode(tokenizer, messages, tools=[TOOL]))
    assert "Ulm" in trained and "Bonn" in trained
    with pytest.raises(UserError, match="record 1: the chat template renders one tool call per turn, but turn 2 has 2"):
        encode(tokenizer_of("gpt-oss"), messages, tools=[TOOL])


def test_tools_choose_the_template_of_that_name() -> None:
    tokenizer = make_tokenizer(CHATML, "<|im_end|>")
    tool_use = THINKING.replace("{%- if tools %}", "{%- if tools | length %}")  # not for conversations without
    tokenizer.chat_template = {"default": CHATML, "tool_use": tool_use}
    assert load_chat_template(tokenizer, None) == CHATML
    assert load_chat_template(tokenizer, None, for_tools=True) == tool_use
    encoder = ChatEncoder(tokenizer, CHATML, ("assistant",), None, tool_template=tool_use)
    with_tools, without = encoder.encode(
        [Conversation(CONVERSATIONS["tools"], [TOOL]), Conversation(CONVERSATIONS["system"])], ["record 1", "record 2"]
    )
    plain = tokenizer.apply_chat_template(CONVERSATIONS["tools"], tools=[TOOL], tokenize=False)
    assert tokenizer.decode(with_tools.input_ids) == plain and "<tool_call>weather" in plain
    assert trained_texts(tokenizer, without) == ["Blue.<|im_end|>"]


JOINED = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<|im_start|>assistant\n"
    "{% for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}<|im_end|>\n"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_and_content_in_the_form_that_the_template_writes(as_text: bool) -> None:
    arguments: dict[str, Any] = {"city": "Köln", "unit": None}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    record = {"messages": [turn("user", "Rain?"), {"role": "assistant", "tool_calls": [{"function": function}]}]}
    example = read_record(record, RecordFormat("messages", {"messages": "messages"}), "record 1")
    assert isinstance(example, Conversation)
    for template, written in (
        (JOINED, 'weather {"city": "Köln", "unit": null}<|im_end|>'),
        (THINKING, '"unit": null}'),
    ):
        tokenizer = make_tokenizer(template, "<|im_end|>")
        assert written in trained_texts(tokenizer, encode(tokenizer, example.messages))[0]


def test_nulls_of_arguments_and_schemas_are_written() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    call = CALL | {"function": {"name": "weather", "arguments": {"city": "Ulm", "unit": None}}}
    tool = {"type": "function", "function": {**WEATHER, "strict": None}}
    encoded = encode(tokenizer, [turn("user", "Rain?"), turn("assistant", "", tool_calls=[call])], tools=[tool])
    assert '"arguments": {"city": "Ulm", "unit": null}' in trained_texts(tokenizer, encoded)[0]
    assert '"strict": null' in tokenizer.decode(encoded.input_ids)
