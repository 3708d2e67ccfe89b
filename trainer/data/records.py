"""Convert records in any supported format into conversations, or into prompts with their completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.config.errors import to_text
from trainer.config.yaml_core import read_yaml
from trainer.data.formats import REQUIRED, UNPAIRED, RecordFormat, describe_type, join_names
from trainer.data.image_parts import IMAGE_MARKER, PART_TYPES, ImageParts

_NAMES: dict[str, str] = read_yaml(Path(__file__).with_name("roles.yaml")).tree
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
ALPACA_WITH_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
ALPACA_WITHOUT_INPUT = "### Instruction:\n{instruction}\n\n### Response:\n"
# Fields of a turn that enable or disable its loss in OpenAI, Axolotl, LLaMA-Factory, ms-swift, verl and torchtune.
WEIGHT_FIELDS = ("weight", "loss", "loss_weight", "loss_scale", "loss_mask", "train", "training", "trainable")
MASK_FIELDS = ("mask", "masked")
# Fields with the reasoning before an answer; most templates use the first name.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Fields of tool calls and content parts that are never reported as unused.
IGNORED_FIELDS = ("type", "index")
# Types of content parts that are text.
TEXT_PARTS = (None, "text", "input_text", "output_text")
# Prompt formats (see `find_prompt_format`): for texts, and for prompts with completions.
PLAIN_TEXT, PLAIN_PROMPT = "{prompt}", "{system}{prompt}"


@dataclass(frozen=True)
class Conversation:
    """A conversation in the format that chat templates read. `weights` contains the turn weights other than 1."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    weights: Mapping[int, float] = field(default_factory=dict)
    unused_fields: tuple[str, ...] = field(default=(), compare=False)
    """Unused nonempty fields of the record and of its turns."""
    images: tuple[bytes, ...] = ()
    """The image for each IMAGE_MARKER in the texts (see `encode_image`)."""


@dataclass(frozen=True)
class PlainText:
    """A prompt, which may be empty, and its completion, both used without a chat template."""

    prompt: str
    completion: str
    unused_fields: tuple[str, ...] = field(default=(), compare=False)


SingleExample = Conversation | PlainText


class TrackedFields(Mapping[str, Any]):
    """A record that tracks which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._names_read = values, set[str]()
        self._inner: list[tuple[str, TrackedFields]] = []

    def __getitem__(self, name: str) -> Any:
        self._names_read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def wrap(self, name: str, records: Sequence[Any]) -> list[Any]:
        """Return `records` (field `name`) with each mapping wrapped, so that `list_unused` includes its fields."""
        wrapped = [TrackedFields(record) if isinstance(record, Mapping) else record for record in records]
        self._inner += [(name, fields) for fields in wrapped if isinstance(fields, TrackedFields)]
        return wrapped

    def list_unused(self) -> tuple[str, ...]:
        nonempty = [name for name, value in self._values.items() if value not in (None, "", [], {})]
        unread = [name for name in nonempty if name not in self._names_read]
        inner = ((name, field) for name, fields in self._inner for field in fields.list_unused())
        return (*unread, *(f"{name}.{field}" for name, field in inner if field not in IGNORED_FIELDS))


def flag_nonempty_answers(example: SingleExample, train_on: frozenset[str]) -> list[bool]:
    """Return, for each trained answer, whether it is nonempty; a completion without a prompt is not an answer."""
    if isinstance(example, PlainText):
        return [bool(example.completion.strip())] if example.prompt else []
    if not train_on & {"assistant", "all"}:
        return []
    return [
        bool(message["content"].strip() or message.get("tool_calls"))
        for turn, message in enumerate(example.messages)
        if message["role"] == "assistant" and example.weights.get(turn, 1.0)
    ]


def read_record(
    record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None = None
) -> SingleExample:
    """Convert a record into a conversation, or into a prompt with its completion, and list its unused fields.

    Raises UserError, prefixed with `origin`, for a bad record. `system_prompt` is used for text prompts that have none;
    it is added to conversations only when they are rendered.
    """
    fields = TrackedFields(record)
    example = _read_example(fields, fmt, origin, system_prompt)
    return replace(example, unused_fields=(*fields.list_unused(), *example.unused_fields))


def find_prompt_format(fmt: RecordFormat, first_record: Mapping[str, Any]) -> str | None:
    """Return the format string for a source's prompts, with `{system}` and `{prompt}`; None for conversations."""
    pair = fmt.names.values() if fmt.name in ("prompt_completion", UNPAIRED) else ()
    turns = any(isinstance(first_record.get(name), list) for name in pair)
    if turns or fmt.name in ("messages", "sharegpt") or (fmt.name == "alpaca" and fmt.alpaca_as_chat):
        return None
    if fmt.name == "alpaca":
        return "{system}" + ALPACA_WITHOUT_INPUT.replace("{instruction}", "{prompt}")
    if fmt.name == "custom":
        template = fmt.template_without_input or fmt.template or ""
        names = [name for name in fmt.names if f"{{{name}}}" in template]
        return "{system}" + template.replace(f"{{{names[0]}}}", "{prompt}") if len(names) == 1 else PLAIN_PROMPT
    return PLAIN_TEXT if fmt.name == "completion" else PLAIN_PROMPT


def _read_example(
    record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None
) -> SingleExample:
    for name in REQUIRED[fmt.name]:
        if record.get(fmt.names[name]) is None:
            others = [key for key, value in record.items() if value is not None]
            fix = "move records of another format to a separate source under dataset.mix"
            fix = fix if others else "add it, or remove the record"
            raise UserError(f"{origin}: {fmt.names[name]} is missing (the record has {join_names(others)}); {fix}")
    if fmt.name in ("messages", "sharegpt"):
        column = fmt.names["conversations" if fmt.name == "sharegpt" else "messages"]
        return _read_turns([(record[column], column, "", True)], record, fmt, origin)
    if fmt.name == "alpaca":
        return _read_alpaca(record, fmt, origin, system_prompt)
    if fmt.name == "prompt_completion":
        prompt, completion = record[fmt.names["prompt"]], record[fmt.names["completion"]]
        if isinstance(prompt, list) or isinstance(completion, list):
            return join_prompt_and_completion(prompt, completion, record, fmt, origin)
    if fmt.name == "completion":
        return PlainText("", _read_text(record, fmt.names["text"], origin))
    if fmt.name == "custom":
        return _fill_template(record, fmt, origin, system_prompt)
    prompt, completion = (_read_text(record, fmt.names[name], origin) for name in ("prompt", "completion"))
    return PlainText(prepend_system_prompt(prompt, record, fmt, origin, system_prompt), completion)


def _fill_template(record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None) -> PlainText:
    assert fmt.template is not None
    values = {name: "" if record.get(column) is None else str(record[column]) for name, column in fmt.names.items()}
    template = fmt.template
    if fmt.template_without_input is not None and not values["input"].strip():
        template = fmt.template_without_input
    prompt = template.format_map(values)
    if "system" not in fmt.names:
        prompt = prepend_system_prompt(prompt, record, fmt, origin, system_prompt)
    return PlainText(prompt, _read_text(record, fmt.names["completion"], origin))


def _read_system_prompt(record: Mapping[str, Any], fmt: RecordFormat, origin: str) -> str | None:
    """Return a record's system prompt: the field `fields.system` (default: `system`), else `system_prompt`."""
    for name in (fmt.names.get("system", "system"), "system_prompt"):
        if record.get(name):
            return _read_text(record, name, origin)
    return None


def _insert_system(
    messages: list[dict[str, Any]], record: Mapping[str, Any], fmt: RecordFormat, origin: str
) -> list[str]:
    """Insert the record's system prompt, or return its field if the turns begin with a different system turn."""
    system = _read_system_prompt(record, fmt, origin)
    if system and messages and messages[0]["role"] == "system":
        return [] if messages[0]["content"] == system else [fmt.names.get("system", "system")]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return []


def prepend_system_prompt(
    prompt: str, record: Mapping[str, Any], fmt: RecordFormat, origin: str, default: str | None
) -> str:
    system = _read_system_prompt(record, fmt, origin) or default
    return f"{system}\n\n{prompt}" if system else prompt


def join_prompt_and_completion(
    prompt: Any, completion: Any, record: Mapping[str, Any], fmt: RecordFormat, origin: str
) -> Conversation:
    """Join prompt and completion (strings or turns) into a conversation that trains only on the completion."""
    parts = []
    for value, name, role in ((prompt, "prompt", "user"), (completion, "completion", "assistant")):
        turns = [{"role": role, "content": value}] if isinstance(value, str) else value
        parts.append((turns, fmt.names[name], f"{fmt.names[name]} ", name == "completion"))
    return _read_turns(parts, record, fmt, origin)


def _read_turns(
    parts: Sequence[tuple[Any, str, str, bool]], record: Mapping[str, Any], fmt: RecordFormat, origin: str
) -> Conversation:
    """Read lists of turns as one conversation.

    Turns are in OpenAI's format (role, content, tool_calls) or ShareGPT's (from, value). `parts` are tuples
    (list of turns, column, name in error messages, whether the turns are trained on).
    """
    images, messages, weights = ImageParts(record, fmt), list[dict[str, Any]](), dict[int, float]()
    unused_fields: list[str] = []
    for number, (value, column, name, is_trained) in enumerate(parts):
        turns = _read_list(value, column, origin)
        turns = [TrackedFields(turn) if isinstance(turn, Mapping) else turn for turn in turns]
        turn_origin = f"{origin}, {name}turn"
        read = [
            _read_message(turn, _find_keys(turn, fmt), f"{turn_origin} {index}", fmt.roles, images)
            for index, turn in enumerate(turns, start=1)
        ]
        unused_fields += _insert_system(read, record, fmt, origin) if number == 0 else []
        first = len(messages) + len(read) - len(turns)
        weights |= _read_weights(turns, turn_origin, first) if is_trained else dict.fromkeys(range(len(read)), 0.0)
        unused_fields += dict.fromkeys(f"{column}.{field}" for turn in turns for field in turn.list_unused())
        messages += read
    tools = _read_tools(record.get(fmt.names.get("tools", "tools")), origin)
    return Conversation(messages, tools, weights, tuple(unused_fields), images.encode_images(origin))


def _find_keys(turn: Any, fmt: RecordFormat) -> tuple[str, str]:
    keys = fmt.names.get("role", "role"), fmt.names.get("content", "content")
    if fmt.name == "sharegpt" or (isinstance(turn, Mapping) and "from" in turn and keys[0] not in turn):
        keys = fmt.names.get("from", "from"), fmt.names.get("value", "value")
    return keys


def build_alpaca_prompt(record: Mapping[str, Any], fmt: RecordFormat, origin: str) -> str:
    """Join the instruction and the optional input, with headings if there is no chat template."""
    instruction = _read_text(record, fmt.names["instruction"], origin)
    extra = _read_text(record, fmt.names["input"], origin) if record.get(fmt.names["input"]) else ""
    if fmt.alpaca_as_chat:
        return f"{instruction}\n\n{extra}" if extra else instruction
    return (ALPACA_WITH_INPUT if extra else ALPACA_WITHOUT_INPUT).format(instruction=instruction, input=extra)


def _read_alpaca(record: Mapping[str, Any], fmt: RecordFormat, origin: str, system_prompt: str | None) -> SingleExample:
    prompt, output = build_alpaca_prompt(record, fmt, origin), _read_text(record, fmt.names["output"], origin)
    if not fmt.alpaca_as_chat:
        return PlainText(prepend_system_prompt(prompt, record, fmt, origin, system_prompt), output)
    turns: list[dict[str, Any]] = []
    for pair in record.get(fmt.names.get("history", "history")) or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(
                f"{origin}: history contains {describe_type(pair)}, not pairs; write [[question, answer], ...]"
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    return _read_turns([(turns, fmt.names["instruction"], "", True)], record, fmt, origin)


def _read_message(
    turn: Any, keys: tuple[str, str], origin: str, roles: Mapping[str, str], images: ImageParts
) -> dict[str, Any]:
    if not isinstance(turn, TrackedFields):
        raise UserError(f"{origin}: is {describe_type(turn)}; write a record with {keys[0]} and {keys[1]}")
    name = turn.get(keys[0])
    word = name.strip().lower() if isinstance(name, str) else ""
    role = roles.get(word) or ROLES.get(word)
    if role is None:
        if keys[0] not in turn:
            names = join_names(turn)
            raise UserError(f"{origin}: has no {keys[0]} (the turn has {names}); add it, or name it in dataset.fields")
        fix = "use system, user, assistant or tool, or map it in the source's `roles`"
        raise UserError(f"{origin}: unknown {keys[0]} {name!r}; {fix}")
    message: dict[str, Any] = {"role": role}
    content = turn.get(keys[1])
    content = turn.wrap(keys[1], content) if isinstance(content, list) else content
    calls = turn.get("tool_calls")
    if name in ("function_call", "tool_call") and not calls:
        call = _parse_json(content, "the tool call is", origin)
        calls, content = call if isinstance(call, list) else [call], None
    elif turn.get("function_call") and not calls:
        calls = [turn["function_call"]]
    if content is None and not calls:
        others = [key for key, value in turn.items() if value and key != keys[0]]
        found = f", but {join_names(others)}" if others else ""
        raise UserError(f"{origin}: the {role} turn has no {keys[1]}{found}; add the field, or remove the turn")
    message["content"] = images.replace_placeholders(_read_content(content, keys[1], origin, images))
    if role == "assistant" and IMAGE_MARKER in message["content"]:
        raise UserError(f"{origin}: an assistant turn has an image, but answers are text; move it to a user turn")
    if calls:
        calls = turn.wrap("tool_calls", _read_list(calls, "tool_calls", origin))
        message["tool_calls"] = [_read_tool_call(call, origin) for call in calls]
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            message[key] = turn[key]
    reasoning = next((turn[key] for key in REASONING_FIELDS if turn.get(key)), None)
    return message | ({REASONING_FIELDS[0]: _read_content(reasoning, "reasoning", origin)} if reasoning else {})


def _read_weights(turns: Sequence[Mapping[str, Any]], origin: str, first_turn: int) -> dict[int, float]:
    """Return the weights below 1 by turn number, starting at `first_turn`. Raises UserError outside [0, 1]."""
    weights: dict[int, float] = {}
    for index, turn in enumerate(turns):
        for name in (*WEIGHT_FIELDS, *MASK_FIELDS):
            value = turn.get(name)
            if value is None:
                continue
            if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
                raise UserError(f"{origin} {index + 1}: {name}={value!r}: must be true, false or a weight from 0 to 1")
            weight = 1.0 - value if name in MASK_FIELDS else float(value)
            if weight < 1:
                weights[first_turn + index] = min(weight, weights.get(first_turn + index, 1.0))
    return weights


def _read_content(content: Any, key: str, origin: str, images: ImageParts | None = None) -> str:
    """Return a message's content as a string, joining OpenAI's parts with IMAGE_MARKER in place of each image."""
    if isinstance(content, list):
        texts = [_read_part(part, images) for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
        part = content[[isinstance(text, str) for text in texts].index(False)]
        kind = f" ({to_text(part['type'], 30)})" if isinstance(part, Mapping) and "type" in part else ""
        raise UserError(f"{origin}: {key} has parts that are neither text nor images{kind}; remove them")
    if not isinstance(content, str | None):
        raise UserError(f"{origin}: {key} is {describe_type(content)}; use a string")
    return content or ""


def _read_part(part: Any, images: ImageParts | None) -> Any:
    if not isinstance(part, Mapping):
        return part
    if images is not None and part.get("type") in PART_TYPES:
        return images.read_part(part)
    return part.get("text") if part.get("type") in TEXT_PARTS else None


def _read_tool_call(call: Any, origin: str) -> dict[str, Any]:
    """Return a call in OpenAI's format. Raises UserError if it has no name, or if its arguments are not JSON."""
    function = call
    if isinstance(call, TrackedFields) and "function" in call:
        [function] = call.wrap("function", [call["function"]])
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{origin}: a tool call has no function.name; add it, with function.arguments")
    # A dict here; ChatTemplate converts it to the type that the template expects.
    arguments = _parse_json(function.get("arguments") or {}, f"arguments of {function['name']} are", origin)
    if not isinstance(arguments or {}, Mapping):
        problem = f"arguments of {function['name']} are {describe_type(arguments)}"
        raise UserError(f"{origin}: {problem}; use a record of names and values")
    tool_call = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return tool_call | ({"id": call["id"]} if call.get("id") else {})


def _read_tools(value: Any, origin: str) -> list[dict[str, Any]] | None:
    """Read tool definitions, given as a list of JSON schemas or as that list in a JSON string."""
    value = None if isinstance(value, str) and not value.strip() else _parse_json(value, "tools are", origin)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{origin}: tools must be a list of function definitions; write them in OpenAI's format")
    for number, tool in enumerate(value, start=1):
        function = tool.get("function", tool)
        if not (isinstance(function, dict) and str(function.get("name") or "").strip()):
            raise UserError(f"{origin}: tool {number} has no function.name; add it, with function.parameters")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _read_list(value: Any, name: str, origin: str) -> list[Any]:
    """Return a value as a list, parsing it first if it is a JSON string, as in CSV files."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parse_json(value, f"{name} is", origin)
    if not isinstance(value, list):
        raise UserError(f"{origin}: {name} is {describe_type(value)}; use a list")
    return value


def _parse_json(value: Any, subject: str, origin: str) -> Any:
    """Parse a JSON string. Return other values unchanged. Raises UserError if a string is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise UserError(f"{origin}: {subject} not JSON ({error.msg}, column {error.colno}); fix it") from None


def _read_text(record: Mapping[str, Any], name: str, origin: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        is_column = isinstance(value, Mapping) and all(isinstance(key, str) and key.isdigit() for key in value)
        fix = 'write the table as records, in pandas with orient="records"' if is_column else "use a string"
        raise UserError(f"{origin}: {name} is {describe_type(value)}; {fix}")
    return value
