"""Any YAML text and any overrides: a line for each mistake, or a configuration that means what was written."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.any_input import or_refused, tries, value_at
from trainer.config import RunConfig, dump_yaml, load_config
from trainer.config.messages import get_setting_type, list_setting_names
from trainer.config.types import AUTO
from trainer.config.values import is_text, list_accepted_types, list_choices

BASE = "base_model: m\noutput_dir: runs/x\ndataset:\n  path: d.jsonl\n"
NAMES = list_setting_names()
TEXTS = [name for name in NAMES if is_text(get_setting_type(name))]
PATHS = {"base_model", "output_dir", "model.tokenizer", "lora.adapter_path", "dataset.path", "dataset.cache_dir"}
NUMBER = re.compile(r"[-+]?[0-9]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

ODD_WORDS = [
    "", " ", "~", "null", "None", "none", "true", "True", "false", "yes", "no", "on", "off", "y", "auto", "AUTO", "all",
    "010", "0x1F", "0o17", "1:30", "1_000", "1_00", "1e3", "1e-4", "1E5", ".5", "5.", "+3", "-1", "-0", "-0.0", "1e999",
    ".inf", "-.inf", ".nan", "nan", "infinity", "1e400", "9" * 30, "9" * 5000, "0b11", "1,5", "1.000,5", "50%",
    "2026-09-09",
    "trial #3", "#", "a: b", "key: value", "- x", "[", "]", "[]", "{}", "[a, b]", "{a: b}", "[a", "{a", "'quoted'",
    '"quoted"', "'", '"', "it's", "!!python/object/apply:os.getpid []", "!!int x", "!!binary x", "&a", "*a", "<<", "=",
    "==", "a=b", "|", ">", "%x", "@x", "`x`", "\\n", "a\tb", "a\nb", "\0", "\x1b[31m", "\u2028", "é", "日本", "🙂",
    "\ud800",
    "~/x", "~nobody/x", "$HOME/x", "${HOME}/x", "${", "$UNSET_HERE/x", "/", "..", ".", "a" * 300, "a/" * 3000,
    "{{ x }}", "latest", "delete", "lora.r=8", "\u0663", "\uff11\uff12",
]  # fmt: skip
scalars = st.one_of(
    st.sampled_from(ODD_WORDS),
    st.integers(-3, 70_000).map(str),
    st.floats(allow_nan=True).map(repr),
    st.text(max_size=12),
    st.text("0123456789+-_.eExo:, ", max_size=8),
)
texts = st.one_of(scalars, st.builds("{}{}{}".format, scalars, st.sampled_from(["", " ", ",", "#", ": "]), scalars))
python_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        scalars,
        st.integers(0, 5),
        st.dates(),
        st.binary(max_size=5),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(scalars | st.integers(), inner, max_size=3)),
    max_leaves=5,
)
word_values = st.sampled_from(sorted({word for name in NAMES for word in list_choices(get_setting_type(name))}))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "config.yaml"


def load(file: Path, text: str, overrides: list[str]) -> RunConfig | None:
    file.write_bytes(text.encode(errors="surrogatepass"))
    loaded = or_refused(lambda: load_config(file, overrides))
    if loaded is None:
        return None
    assert all(note.strip() and "\n" not in note for note in loaded.notes), loaded.notes
    assert_comes_back(file, loaded.config)
    return loaded.config


def assert_comes_back(file: Path, config: RunConfig) -> None:
    """What is written down of a configuration is the same one when it is read, by readers of YAML 1.1 too."""
    text = dump_yaml(config)
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    file.write_text(text, encoding="utf-8")
    assert load_config(file).config == config


def assert_means(name: str, written: str, value: Any) -> None:
    """A value that was accepted from a command line is what stands there."""
    text = written.strip()
    unquoted = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    if isinstance(value, bool):
        assert unquoted.lower() == str(value).lower(), (name, written, value)
    elif isinstance(value, (int, float)):
        if value == AUTO:
            assert unquoted.lower() == "auto", (name, written, value)
            return
        number = re.sub(r"(?<=[0-9])_(?=[0-9]{3})", "", unquoted.strip())
        based = {"0x": 16, "0o": 8}.get(number[:2])
        if based:
            assert int(number[2:], based) == value, (name, written, value)
        else:
            assert NUMBER.fullmatch(number), (name, written, value)
            if name in ("training.eval_steps", "training.save_steps") and 0.0 < float(number) < 1.0:
                return  # a fraction of the run, which sets evals_per_epoch or saves_per_epoch
            assert math.isclose(float(number), value, rel_tol=1e-15), (name, written, value)
    elif isinstance(value, str) and name in TEXTS and name not in PATHS and text == unquoted:
        assert value == written, (name, written, value)
    elif value is None:
        assert unquoted.lower() in ("", "~", "null", "none", "false"), (name, written, value)


@given(name=st.sampled_from(NAMES), text=texts | word_values)
@example("logging.run_name", "trial #3")
@example("training.batch_size", "010")
@example("training.max_steps", "1:30")
@example("training.batch_size", "true")
@example("training.save_steps", "0.044715")
@tries(250)
def test_any_value_of_a_setting_on_the_command_line(file: Path, name: str, text: str) -> None:
    config = load(file, BASE, [f"{name}={text}"])
    if config is not None:
        assert_means(name, text, value_at(config, name))


@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=8), texts | word_values), max_size=4))
@tries(80)
def test_any_overrides(file: Path, overrides: list[tuple[str, str]]) -> None:
    load(file, BASE, [f"{name}={text}" for name, text in overrides])


@given(st.lists(st.text(max_size=20), max_size=3))
@tries(40)
def test_any_text_as_an_override(file: Path, overrides: list[str]) -> None:
    load(file, BASE, overrides)


def nested(name: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"base_model": "m", "output_dir": "runs/x", "dataset": {"path": "d.jsonl"}}
    *sections, last = name.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    return tree


@given(name=st.sampled_from(NAMES), value=python_values | word_values)
@example("adapter", {"lora": None})
@tries(250)
def test_any_value_of_a_setting_in_a_file(file: Path, name: str, value: Any) -> None:
    try:
        text = yaml.safe_dump(nested(name, value), allow_unicode=True)
    except UnicodeEncodeError:
        return
    config = load(file, text, [])
    if config is None:
        return
    accepted = value_at(config, name)
    if isinstance(accepted, (bool, int, float)) and isinstance(value, (bool, int, float)):
        assert accepted == value and isinstance(accepted, bool) == isinstance(value, bool), (name, value, accepted)
    elif isinstance(accepted, str) and isinstance(value, str) and name in TEXTS and name not in PATHS:
        assert accepted == value, (name, value, accepted)
    elif isinstance(accepted, (bool, int, float)) and isinstance(value, str):
        assert_means(name, value, accepted)


marks = ["\n  ", ": ", "- ", "!!", "<<: ", "*a", "&a ", "---\n", "...\n", "\r\n"]
pieces = st.sampled_from(
    [*"[]{}:,#&*!|>'\"%@`-?~ \n\t\0\ufeff\ud800é=", *marks]
    + [f"{name.rsplit('.', 1)[-1]}: " for name in NAMES]
    + ["lora_r: 8\n", "datasets:\n", "load_in_4bit: true\n", "stage: dpo\n", "seed: ", "training: ", "lora: {r: "]
)
whole = BASE + "seed: 3\nlora:\n  r: 8\n  target_modules: [q_proj, v_proj]\ntraining: {epochs: 1.5, max_steps: 3}\n"


@given(st.lists(st.tuples(st.integers(0, len(whole)), st.integers(0, 6), pieces | st.text(max_size=4)), max_size=6))
@tries(250)
def test_any_text_as_a_file(file: Path, changes: list[tuple[int, int, str]]) -> None:
    text = whole
    for at, cut, piece in changes:
        text = text[:at] + piece + text[at + cut :]
    load(file, text, [])


@given(st.binary(max_size=60), st.integers(0, len(whole)))
@tries(60)
def test_any_bytes_as_a_file(file: Path, content: bytes, at: int) -> None:
    for data in (content, whole[:at].encode() + content + whole[at:].encode()):
        file.write_bytes(data)
        or_refused(lambda: load_config(file))


def test_the_schema_has_settings_of_every_kind() -> None:
    """What the tests above draw from is not empty."""
    assert len(NAMES) > 100 and len(TEXTS) > 8
    assert {int, float, bool, tuple, dict} <= set().union(
        *(list_accepted_types(get_setting_type(name)) for name in NAMES)
    )
