"""Import the examples of other trainers and train two steps of each on a tiny model of its family.

`python -m tests.bench.imported_runs AXOLOTL/examples LLAMA-FACTORY/examples [--only PART] [--write RESULTS.json]`

The folders are those of `scripts.import_table`. Of an imported configuration everything is kept but what names the hub
(the model, data that is not next to the file), lengths and counts, and what needs several ranks. The model is a random
one of the same model type, the data has the imported format and field names. Data of LLaMA-Factory that its repository
has is used as it is.
"""

import argparse
import json
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from safetensors import safe_open

from launcher.importing.command import format_yaml, translate_arguments
from scripts.import_table import _trains_an_adapter, _tree
from tests.families import save_family
from tests.four_bits import store_in_four_bits
from tests.runs_in_process import train
from tests.tiny import WORDS
from tests.vision import COLORS, PROCESSORS, draw, make_vision_model
from trainer.config import UserError

HUB_ONLY = "qwen-7b|dbrx-base-converted|replit|mimo"
"""Models with code outside transformers."""
KINDS = {
    r"seed-oss": "seed_oss", "command-r7b|c4ai": "cohere2", "gpt-j": "gptj", "pythia": "gpt_neox", "smolvlm": "smolvlm",
    "lfm2-vl": "lfm2_vl", "lfm2-8b": "lfm2_moe", "glm-5": "glm_moe_dsa", "minimax-m2": "minimax_m2",
    "internvl": "internvl", "paddleocr-vl": "paddleocr_vl", r"qwen1\.5-moe": "qwen2_moe", "qwen2-vl": "qwen2_vl",
    r"qwen2\.5-vl": "qwen2_5_vl", "qwen3-next": "qwen3_next", "qwen3-vl-.*a3b": "qwen3_vl_moe", "qwen3-vl": "qwen3_vl",
    r"qwen3\.5-.*a\d+b": "qwen3_5_moe", r"qwen3\.5": "qwen3_5", r"qwen3-\d+b-a\d+b": "qwen3_moe",
    "qwen3|plano": "qwen3", "qwen2|deepcoder|preview-qwen": "qwen2", "xgen|yi-|open_llama": "llama",
    "glm-4-32b": "glm4", "jamba": "jamba", "olmo-3": "olmo3", r"afm-4\.5b": "arcee", "trinity": "afmoe",
    r"mistral-medium-3\.5|magistral-small-2509|mistral-small-(3\.1|4)|ministral-3": "mistral3",
    r"deepseek-v2": "deepseek_v2", r"deepseek-v3": "deepseek_v3", "deepseek-v4": "deepseek_v4", "llama-4": "llama4",
    "starcoder2": "starcoder2", "cerebras": "gpt2", "gemma-2": "gemma2", "gemma-3-(1b|270m)": "gemma3_text",
    "gemma-3-4b": "gemma3", "gemma-3n": "gemma3n", "gemma-4-12b": "gemma4_unified", "gemma-4": "gemma4",
    "gemma-7b": "gemma", "llava": "llava", r"phi-3": "phi3", "phi-1": "phi", "mixtral": "mixtral", "pixtral": "pixtral",
    "ministral-8b|devstral|magistral|mistral-7b": "mistral", "voxtral": "voxtral", "kimi-linear": "kimi_linear",
    "nemotron-3": "nemotron_h", "nemotron-mini": "nemotron", "gpt-oss": "gpt_oss",
    "stablelm": "stablelm", "apertus": "apertus", "hunyuan": "hunyuan_v1_dense", "falcon-h1": "falcon_h1",
    "falcon-7b": "falcon", r"glm-4\.5": "glm4_moe", r"glm-4\.6v": "glm46v", r"glm-4\.7": "glm4_moe_lite",
    "llama|cogito": "llama",
}  # fmt: skip
"""Name of a model -> its model type; the first that matches."""
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
CHANGES = {"gemma3n": {"vision_config": {"architecture": "test_convnext", "hidden_size": 64}}}
"""Gemma 3n's own tower has 300 million parameters."""
STORED = {"gptq": "gptq", "awq": "awq", "nvfp4": "nvfp4"}
COUNT = 24
LENGTH = 250
REAL_LENGTH = 2048
"""Of data that the repository has, in bytes."""


def model_type(name: str) -> str:
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, name.lower())), "")


def make_base(folder: Path, name: str, score: bool = False) -> Path:
    """A tiny model of the family of a name, stored in the format that its name says."""
    kind = model_type(name)
    form = next((form for part, form in STORED.items() if re.search(rf"(?<![a-z]){part}(?![a-z])", name.lower())), "")
    has_experts = kind == "gemma4" and "a4b" in name.lower()
    target = folder / f"{kind}{'-experts' * has_experts}-{form}"
    if not target.exists():
        target.mkdir(parents=True)
        try:
            if kind in PROCESSORS:
                make_vision_model(target, kind, **(GEMMA_EXPERTS if has_experts else {}))
            else:
                save_family(target, kind, **CHANGES.get(kind, {}))
            if form:
                with safe_open(target / "model.safetensors", "pt") as file:
                    towers = [name.removesuffix(".weight") for name in file.keys() if "vision" in name]
                store_in_four_bits(target, form, leave_out=["lm_head", *towers])
        except BaseException:
            shutil.rmtree(target)
            raise
    return target


def text(number: int, words: int = 5) -> str:
    return " ".join(WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(words))


def make_records(source: dict[str, Any], folder: Path, images: bool) -> list[dict[str, Any]]:
    """Records in the format of a source, with its names of fields and roles."""
    form, fields, roles = source.get("format", "auto"), source.get("fields", {}), source.get("roles", {})

    def name(ours: str) -> str:
        return str(fields.get(ours, ours))

    def role(ours: str, default: str) -> str:
        known = roles.get(ours)
        return str(known if isinstance(known, str) else known[0]) if known else default

    records = []
    for number in range(COUNT):
        question, answer, worse = text(number), text(number + 3), text(number + 8)
        if images:
            color = list(COLORS)[number % len(COLORS)]
            picture = draw(folder / f"{number}.png", COLORS[color], 60, 40)
            parts: list[Any] = [{"type": "image", "path": str(picture)}, {"type": "text", "text": question}]
            if form == "preference":  # as in LLaMA-Factory's RLHF-V
                turn = [{"from": "human", "value": f"<image>{question}"}]
                chosen, rejected = ({"from": "gpt", "value": each} for each in (answer, worse))
                pair = {"chosen": chosen, "rejected": rejected, "images": [str(picture)]}
                records.append({name("conversations"): turn, **pair})
                continue
            turns: list[Any] = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            records.append({name("messages"): turns})
            continue
        said = {"role": name("role"), "content": name("content")}
        sharegpt = {"role": name("from"), "content": name("value")}
        if form in ("messages", "auto"):
            record: dict[str, Any] = {
                name("messages"): [
                    {said["role"]: role("user", "user"), said["content"]: question},
                    {said["role"]: role("assistant", "assistant"), said["content"]: answer},
                ]
            }
        elif form == "sharegpt":
            record = {
                name("conversations"): [
                    {sharegpt["role"]: role("user", "human"), sharegpt["content"]: question},
                    {sharegpt["role"]: role("assistant", "gpt"), sharegpt["content"]: answer},
                ]
            }
        elif form == "alpaca":
            record = {name("instruction"): question, name("input"): text(number, 2), name("output"): answer}
        elif form == "completion":
            record = {name("text"): f"{question} {answer}"}
        elif form == "prompt_completion":
            record = {name("prompt"): question, name("completion"): answer}
        elif form == "custom":
            marks = re.findall(r"(?<!\{)\{(\w+)\}(?!\})", source.get("template", ""))
            record = {name(mark): text(number + at) for at, mark in enumerate(marks)} | {name("completion"): answer}
        elif form == "preference" and "messages" in fields:
            asked, chosen, rejected = (
                {said["role"]: role(ours, ours), said["content"]: content}
                for ours, content in (("user", question), ("assistant", answer), ("assistant", worse))
            )
            record = {name("messages"): [asked], name("chosen"): chosen, name("rejected"): rejected}
        elif form == "preference":
            key = name("instruction") if "instruction" in fields else name("prompt")
            record = {key: question, name("chosen"): answer, name("rejected"): worse}
        else:
            record = {name("prompt"): question, name("completion"): answer, name("label"): number % 2 == 0}
        records.append(record)
    return records


def localize(source: dict[str, Any], folder: Path, number: int, images: bool) -> dict[str, Any]:
    """A source with data on this machine."""
    if source.get("path") and Path(source["path"]).exists():
        return {**source, "max_samples": min(COUNT, source.get("max_samples", COUNT))}
    path = folder / f"data-{number}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in make_records(source, folder, images)))
    return {key: value for key, value in source.items() if key in ("format", "fields", "roles", "template", "weight",
            "template_without_input")} | {"path": str(path)}  # fmt: skip


def has_images(tree: dict[str, Any], source: Any) -> bool:
    paths = json.dumps(tree.get("datasets", "")).lower()
    is_named = re.search(r"(?<![a-z])(llava|images?|vision|vqa)(?![a-z])", paths)
    return bool("max_pixels" in source or (tree.get("processor_type") and tree.get("skip_prepare_dataset")) or is_named)


def make_local(config: dict[str, Any], tree: dict[str, Any], folder: Path, models: Path) -> dict[str, Any]:
    """The configuration with a tiny model, data on this machine, two steps, and one rank."""
    config = {name: value for name, value in config.items() if name not in ("parallel", "logging", "output_dir")}
    base = make_base(models, config["base_model"], config.get("task") == "reward")
    data = dict(config.get("dataset", {}))
    images = has_images(tree, data)
    sources = data.pop("mix", None)
    if sources:
        data["mix"] = [localize(source, folder, number, images) for number, source in enumerate(sources)]
    else:
        keys = ("path", "name", "revision", "data_files", "split", "max_samples")
        localized = localize(data, folder, 0, images)
        data = {key: value for key, value in data.items() if key not in keys} | localized
    if "evaluation" in data:
        data["evaluation"] = localize(data["evaluation"], folder, 99, images)
    paths = [each["path"] for each in data.get("mix", [data])]
    length = LENGTH if all(path.startswith(str(folder)) for path in paths) else REAL_LENGTH
    data["max_length"] = length * (2 if config.get("task") == "preference" else 1)
    data["cache_dir"] = str(folder / "cache")
    training = {**config.get("training", {}), "max_steps": 2}
    training.pop("epochs", None)
    training.pop("torch_compile", None)  # minutes on a CPU
    if "warmup_steps" in training:
        training["warmup_steps"] = min(1, training["warmup_steps"])
    if "gradient_accumulation_steps" in training:
        training["gradient_accumulation_steps"] = min(2, training["gradient_accumulation_steps"])
    training["batch_size"] = min(2, training.get("batch_size", 1))
    config.get("model", {}).pop("revision", None)
    if training.get("precision") == "fp16":  # which needs a GPU
        training["precision"] = "fp32"
    if "pad_token" in config.get("model", {}):
        config["model"]["pad_token"] = "<|endoftext|>"  # the tests' tokenizer has no other
    lora = config.get("lora", {})
    lora.pop("adapter_path", None)
    if "r" in lora:
        lora["r"] = min(16, lora["r"])
    return config | {
        "base_model": str(base), "output_dir": str(folder / "run"), "dataset": data, "training": training,
        "logging": {"report_to": "none", "progress": "lines"},
    }  # fmt: skip


def run_one(file: Path, models: Path, dataset_dir: Path | None) -> dict[str, Any]:
    """The outcome of one file: `trained` with the losses, `refused` or `failed` with the reason."""
    try:
        is_factory = "finetuning_type" in _tree(file)
        translation = translate_arguments([str(file)], dataset_dir if is_factory else None)
    except UserError as error:
        reason = str(error).partition("\n")[0]
        return {"outcome": "refused", "reason": reason.replace(f"{file}:", "line ", 1)}
    config = yaml.safe_load(format_yaml(translation, ""))
    kind = model_type(str(config["base_model"]))
    found: dict[str, Any] = {"model_type": kind}
    if re.search(HUB_ONLY, config["base_model"].lower()):
        return {"outcome": "not run", "reason": "the code of the model is only on the hub"}
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            local = make_local(config, _tree(file), folder, models)
            (folder / "base.yaml").write_text(yaml.safe_dump(local))
            shown = train(folder)
            records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
            losses = [record["train/loss"] for record in records if "train/loss" in record]
            steps = max(record.get("step", 0) for record in records)
            found |= {"outcome": "trained" if steps == 2 else "failed", "losses": [round(each, 4) for each in losses]}
            if steps != 2:
                found["reason"] = f"{steps} steps; {shown[-300:]}"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if not isinstance(error, UserError) else ""
            text = str(error).strip().partition("\n")[0].replace(str(folder), "").replace(str(models), "")
            found |= {"outcome": "failed", "reason": f"{type(error).__name__}: {text}{at}"}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="files with this part in their path")
    parser.add_argument("--models", type=Path, required=True, help="folder for the tiny models")
    parser.add_argument("--dataset-dir", type=Path, help="the folder of LLaMA-Factory's dataset_info.json")
    parser.add_argument("--write", type=Path, help="where to write the outcomes; files that it has as trained are kept")
    arguments = parser.parse_args()
    known = json.loads(arguments.write.read_text()) if arguments.write and arguments.write.exists() else {}
    for folder in arguments.folders:
        for file in sorted(path for path in folder.rglob("*") if path.suffix in (".yml", ".yaml")):
            label = str(file.relative_to(folder.parent.parent))
            if not _trains_an_adapter(_tree(file)) or not re.search(arguments.only, label):
                continue
            if known.get(label, {}).get("outcome") == "trained":
                continue
            print(label, end="  ", flush=True)
            start = time.perf_counter()
            known[label] = run_one(file, arguments.models, arguments.dataset_dir)
            print(f"{known[label]}  {time.perf_counter() - start:.0f} s", flush=True)
            if arguments.write:
                arguments.write.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    counts = [result["outcome"] for result in known.values()]
    print({outcome: counts.count(outcome) for outcome in sorted(set(counts))}, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
