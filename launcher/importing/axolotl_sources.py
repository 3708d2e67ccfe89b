"""Axolotl's data sets: `datasets`, `test_datasets` and `pretraining_dataset`, and which of their tokens are learnt."""

import re
from typing import Any

from launcher.importing.prompts import CHAT_TEMPLATES, STYLES, alpaca
from launcher.importing.translation import Translation
from trainer.config import UserError
from trainer.config.data_sections import SourceSection
from trainer.config.source_dialect import source_settings

OWN = ("tokenizer_default", None)
VISION = "images, video and sound are not trained on"
# Of a source, without counterpart: what is cut up or marked differently.
REFUSED = {
    "message_field_training": "a field that says which turns are learnt must be called `train` (true or false) here",
    "message_field_training_detail": "learning parts of a turn is not offered",
    "shards": "a part of a data set is written as split: train[:10%]",
    "input_transform": "records are read as they are; transform them before",
}
DROPPED = ("shards_idx", "field_thinking", "template_thinking_key", "split_thinking", "drop_system_message", "skip")


def take_data(translation: Translation) -> None:
    """All sources, the length of a sequence, packing and what is held out."""
    theirs = translation.theirs
    _refuse_vision(translation)
    train = theirs.take("datasets")
    streamed = theirs.take("pretraining_dataset")
    if streamed:
        _pretraining(translation, streamed)
    elif not train:
        raise theirs.refused("datasets", "missing; nothing to train on")
    else:
        sources = _sources(translation, train, "datasets")
        _put(translation, "dataset", sources, "datasets")
        if theirs.take("streaming") is True:
            translation.set("dataset.streaming", True, "streaming")
    _held_out(translation)
    translation.copy_or("dataset.max_length", 512, "sequence_len")
    longer = theirs.take("excess_length_strategy", default="drop")
    if longer == "raise":
        translation.differs("excess_length_strategy", "records that are too long are left out, and counted")
    if longer != "truncate" and not streamed:
        translation.default("dataset.too_long", "drop")
    packs = theirs.take("sample_packing")
    if packs is not None:
        translation.set("dataset.packing", bool(packs), "sample_packing")
    theirs.take("eval_sample_packing", "pretraining_sample_concatenation")
    if theirs.has("sample_packing_sequentially", "curriculum_sampling"):
        name = theirs.has("curriculum_sampling", "sample_packing_sequentially") or ""
        translation.set("dataset.shuffle", False, name)
    if theirs.has("dataset_exact_deduplication"):
        translation.leave_out("dataset_exact_deduplication", "copies are counted and reported, not removed")
    translation.copy("dataset.system_prompt", "default_system_message")
    _chat_template(translation)
    _roles(translation)


def _refuse_vision(translation: Translation) -> None:
    theirs = translation.theirs
    skips = theirs.take("skip_prepare_dataset") is True
    sources = [entry for entry in theirs.tree.get("datasets") or [] if isinstance(entry, dict)]
    paths = " ".join(str(entry.get("path")) for entry in sources).lower()
    if (theirs.tree.get("processor_type") and skips) or re.search(r"llava|image|vision|audio|vqa|librispeech", paths):
        raise theirs.refused("processor_type" if theirs.tree.get("processor_type") else "datasets", VISION)


def _put(translation: Translation, at: str, sources: list[dict[str, Any]], name: str) -> None:
    if len(sources) == 1 and at == "dataset":
        for key, value in sources[0].items():
            translation.set(f"dataset.{key}", value, name)
    elif at == "dataset":
        translation.set("dataset.mix", sources, name)
    else:
        translation.set(at, sources[0], name)


def _sources(translation: Translation, entries: Any, name: str) -> list[dict[str, Any]]:
    listed = entries if isinstance(entries, list) else [entries]
    return [_source(translation, entry, name) for entry in listed]


def _source(translation: Translation, entry: Any, name: str) -> dict[str, Any]:
    theirs = translation.theirs
    if isinstance(entry, str):
        return {"path": entry}
    entry = {key: value for key, value in entry.items() if value not in (None, "", [], {})}
    for key, reason in REFUSED.items():
        if key in entry:
            raise theirs.refused(f"{name}.{key}", reason)
    dropped = [key for key in DROPPED if key in entry]
    if dropped:
        translation.leave_out(name, f"{', '.join(dropped)}: records are read as they stand")
    kind = entry.pop("type", None)
    entry = {key: value for key, value in entry.items() if key not in (*DROPPED, "roles_to_train", "chat_template")}
    entry.pop("chat_template_jinja", None)
    fields = dict(entry.pop("fields", {}))
    ours = _format(translation, kind, entry, name)
    try:
        settings, _ = source_settings(entry)
    except UserError as error:
        raise theirs.refused(name, str(error)) from None
    if ours.get("format") not in (None, "completion", "custom", "messages", "sharegpt", "alpaca"):
        raise theirs.refused(name, f"{kind}: this prompt format is not offered; write records as messages")
    settings["fields"] = {**settings.get("fields", {}), **ours.pop("fields", {}), **fields}
    if not settings["fields"]:
        del settings["fields"]
    for key in [key for key in settings if key not in SourceSection.model_fields]:
        translation.leave_out(name, f"{key} of a source: there is nothing like it here")
        del settings[key]
    settings |= ours
    return {key: settings[key] for key in SourceSection.model_fields if key in settings}


def _format(translation: Translation, kind: Any, entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a source that its `type` stands for."""
    if isinstance(kind, dict):
        return _own_prompt(translation, kind, name)
    word, _, style = str(kind or "").partition(":")
    base = word.partition(".")[0]
    if base == "chat_template":
        if style or word.partition(".")[2] in ("", "default", "argilla", "argilla_chat"):
            return {"format": "messages"}
    elif base in ("sharegpt", "completion"):
        return {"format": base}
    elif word == "alpaca" and (style or "instruct") in STYLES:
        with_input, without = alpaca(style or "instruct")
        return {
            "format": "custom",
            "template": with_input,
            "template_without_input": without,
            "fields": {"completion": "output"},
        }
    if kind is None:
        raise translation.theirs.refused(name, "a source without a type, tokenised already; give its texts")
    raise translation.theirs.refused(
        name, f"type {kind}: this prompt format is not offered; write the records as messages, or prompt and completion"
    )


def _own_prompt(translation: Translation, kind: dict[str, Any], name: str) -> dict[str, Any]:
    """A prompt that the user has written: its own marks, with our names for its fields."""
    names = {mark: str(kind.get(f"field_{mark}") or mark) for mark in ("instruction", "input", "output", "system")}
    head = str(kind.get("system_format") or "{system}") if kind.get("system_prompt") else ""
    head = head.replace("{system}", str(kind.get("system_prompt") or "").replace("{", "{{").replace("}", "}}"))
    if kind.get("field_system") and not kind.get("system_prompt"):
        translation.leave_out(name, "field_system: a system text of each record's own; put {its field} into template")
    with_input = head + str(kind.get("format") or "{instruction} {input} ")
    without = head + str(kind.get("no_input_format") or "{instruction} ")
    fields = {mark: field for mark, field in names.items() if mark in ("instruction", "input") and field != mark}
    fields = {mark: field for mark, field in fields.items() if f"{{{mark}}}" in with_input + without}
    ours: dict[str, Any] = {
        "format": "custom",
        "template": with_input,
        "fields": fields | {"completion": names["output"]},
    }
    if "{input}" in with_input:
        ours["template_without_input"] = without
    return ours


def _pretraining(translation: Translation, streamed: Any) -> None:
    theirs = translation.theirs
    entry = streamed[0] if isinstance(streamed, list) else streamed
    if isinstance(streamed, list) and len(streamed) > 1:
        raise theirs.refused("pretraining_dataset", "several streamed sources: put them into dataset.mix by hand")
    source = _source(translation, {"type": "completion", **({"path": entry} if isinstance(entry, str) else {
        key: value for key, value in entry.items() if key != "type"})}, "pretraining_dataset")  # fmt: skip
    _put(translation, "dataset", [source], "pretraining_dataset")
    theirs.take("datasets")
    if theirs.take("streaming") is not False:
        translation.set("dataset.streaming", True, "pretraining_dataset")


def _held_out(translation: Translation) -> None:
    theirs = translation.theirs
    fraction, test = theirs.take("val_set_size"), theirs.take("test_datasets")
    if test:
        sources = _sources(translation, test, "test_datasets")
        if len(sources) > 1:
            translation.leave_out("test_datasets", f"the first of {len(sources)} is evaluated on")
        _put(translation, "dataset.evaluation", sources, "test_datasets")
    elif fraction:
        if float(fraction) >= 1:
            raise theirs.refused("val_set_size", "a number of records; write a fraction of them, such as 0.05")
        if "dataset.streaming" in translation.settings:
            translation.leave_out("val_set_size", "a stream cannot be split; give dataset.evaluation")
        else:
            translation.set("dataset.val_split", fraction, "val_set_size")


def _chat_template(translation: Translation) -> None:
    theirs = translation.theirs
    sources = [entry for entry in theirs.tree.get("datasets") or [] if isinstance(entry, dict)]
    inner = {entry.get("chat_template") for entry in sources} - {None}
    if len(inner) > 1:
        raise theirs.refused("datasets", f"chat templates {', '.join(sorted(map(str, inner)))}: one is used for all")
    jinja = theirs.take("chat_template_jinja") or next(
        (e["chat_template_jinja"] for e in sources if e.get("chat_template_jinja")), None
    )
    name = theirs.take("chat_template") or next(iter(inner), None)
    theirs.take("chat_template_kwargs")
    if jinja:
        translation.set("dataset.chat_template", jinja, "chat_template_jinja")
    elif name in OWN or not any("chat_template" in str(entry.get("type")) for entry in sources):
        if name not in OWN:
            translation.no_effect.append("chat_template")
    elif str(name).startswith("tokenizer_default_fallback_") or name not in CHAT_TEMPLATES:
        translation.differs(
            "chat_template", f"{name}: the tokenizer's own template is used, which instruct models have"
        )
    else:
        translation.set("dataset.chat_template", CHAT_TEMPLATES[name], "chat_template")


def _roles(translation: Translation) -> None:
    theirs = translation.theirs
    sources = [entry for entry in theirs.tree.get("datasets") or [] if isinstance(entry, dict)]
    kinds = {tuple(entry["roles_to_train"]) for entry in sources if entry.get("roles_to_train")}
    top = theirs.take("roles_to_train")
    if len(kinds) > 1:
        raise theirs.refused("datasets", "roles_to_train of several kinds: the roles are those of all sources here")
    if theirs.take("train_on_inputs") is True:
        translation.set("dataset.train_on", ["all"], "train_on_inputs")
    elif kinds or top:
        roles = [{"gpt": "assistant", "human": "user"}.get(role, role) for role in (top or next(iter(kinds)))]
        translation.set("dataset.train_on", list(dict.fromkeys(roles)), "roles_to_train" if top else "datasets")
    theirs.take("train_on_eos", "train_on_eot")
