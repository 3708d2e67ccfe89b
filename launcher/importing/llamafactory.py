"""LLaMA-Factory's YAML and its dataset_info.json: what each of their settings is here, and its defaults."""

import json
import re
from typing import Any

from launcher.importing import common_words as words
from launcher.importing import llamafactory_v1
from launcher.importing.prompts import CHAT_TEMPLATES
from launcher.importing.translation import Setting, Theirs, Translation

PREFERENCES = "preference and reward training are not offered"
VISION = "images, video and sound are not trained on"
MEDIA = ("images", "videos", "audios")
REFUSED = {
    "use_galore": "GaLore is not offered",
    "use_apollo": "APOLLO is not offered",
    "use_badam": "BAdam is not offered",
    "use_adam_mini": "Adam-mini is not offered; AdamW is",
    "use_muon": "Muon is not offered; AdamW is",
    "use_llama_pro": "LLaMA Pro is not offered",
    "mixture_of_depths": "mixture of depths is not offered",
    "use_dft_loss": "this loss is not offered; the loss is cross-entropy",
    "use_asft_loss": "this loss is not offered; the loss is cross-entropy",
    "use_eaft_loss": "this loss is not offered; the loss is cross-entropy",
    "mask_history": "learning the last answer alone is not offered; set `train: false` in the turns of your records",
    "fp8": "training in 8-bit floats is not offered",
    "use_mca": "Megatron is not offered",
    "shift_attn": "shifted sparse attention is not offered",
    "interleave_probs": "give each source of dataset.mix its weight",
    "rope_scaling": "longer contexts than the model's are set in its config.json",
    "train_from_scratch": "a model is trained from its weights here",
}
WITHOUT_EFFECT = (
    "do_train do_eval plot_loss overwrite_cache preprocessing_batch_size ddp_timeout ddp_find_unused_parameters "
    "dataloader_num_workers include_num_input_tokens_seen logging_steps use_fast_tokenizer low_cpu_mem_usage "
    "upcast_layernorm upcast_lmhead_output enable_liger_kernel use_unsloth use_unsloth_gc use_reentrant_gc "
    "save_only_model split_special_tokens resize_vocab flash_attn image_max_pixels image_min_pixels video_max_pixels "
    "video_maxlen video_fps audio_sampling_rate use_v1_kernels infer_backend infer_dtype use_kv_cache "
    "predict_with_generate preprocessing_num_workers data_shared_file_system ignore_pad_token_for_loss buffer_size "
    "save_strategy save_safetensors disable_shuffling ray_num_workers use_cache print_param_status cache_dir "
    "ray_run_name ray_storage_path resources_per_worker placement_strategy pissa_convert quantization_device_map "
    "moe_aux_loss_coef crop_to_patches export_dir tool_format default_system enable_thinking hf_hub_token"
).split()
PREFIXES = (
    "export_",
    "ray_",
    "swanlab_",
    "vllm_",
    "ms_",
    "om_",
    "fsdp_cpu",
    "freeze_vision",
    "freeze_multi",
    "pref_",
    "kt_",
)


def translate(theirs: Theirs) -> Translation:
    """Ours from LLaMA-Factory's. Raises Refused for what is not offered here."""
    if "train_dataset" in theirs.tree or isinstance(theirs.tree.get("peft_config"), dict):
        return llamafactory_v1.translate(theirs)
    translation = Translation(theirs)
    _refuse(theirs)
    _model(translation)
    _adapter(translation)
    _data(translation)
    _training(translation)
    words.fsdp(translation)
    words.deepspeed(translation)
    if theirs.take("use_kt") is True:
        translation.differs("use_kt", "experts are computed on the GPU; zero.offload_parameters keeps them on the host")
    words.reporters(translation, "report_to")
    translation.copy("logging.run_name", "run_name")
    translation.copy("logging.project", "project")
    translation.finish(WITHOUT_EFFECT, PREFIXES)
    return translation


def _refuse(theirs: Theirs) -> None:
    stage = theirs.take("stage", default="sft")
    if stage not in ("sft", "pt"):
        raise theirs.refused("stage", PREFERENCES)
    if theirs.tree.get("do_train") is False or theirs.has("do_predict", "eval_dataset_only"):
        raise theirs.refused("do_predict" if "do_predict" in theirs.tree else "do_train", "nothing is trained by it")
    if theirs.take("finetuning_type", default="lora") not in ("lora", "full"):
        raise theirs.refused("finetuning_type", "adapters here are LoRA's; or all weights are trained")
    for name, reason in REFUSED.items():
        if theirs.has(name):
            raise theirs.refused(name, reason)
    if "dataset" not in theirs.tree and "stage" not in theirs.tree:
        raise theirs.refused("dataset", "missing: the file trains nothing")
    if found := words.QUANTIZED_NAMES.search(str(theirs.tree.get("model_name_or_path") or "")):
        raise theirs.refused("model_name_or_path", f"its weights are in {found.group(1)}; name the 16-bit model")


def _model(translation: Translation) -> None:
    theirs = translation.theirs
    if not translation.copy("base_model", "model_name_or_path"):
        raise theirs.refused("model_name_or_path", "missing; a model must be named")
    revision = theirs.take("model_revision")
    if revision not in (None, "main"):
        translation.set("model.revision", revision, "model_revision")
    translation.copy("model.trust_remote_code", "trust_remote_code")
    translation.copy("model.added_tokens", "add_special_tokens", "add_tokens")


def _adapter(translation: Translation) -> None:
    theirs = translation.theirs
    bits, method = theirs.take("quantization_bit"), str(theirs.take("quantization_method", default="bnb"))
    if theirs.tree.get("finetuning_type") == "full":
        translation.set("adapter", "none", "finetuning_type")
        return
    if bits is None:
        translation.settings["adapter"] = Setting("lora", theirs.where("finetuning_type"))
    elif bits == 4:
        translation.set("adapter", "qlora", "quantization_bit")
        if method not in ("bnb", "bitsandbytes"):
            translation.differs("quantization_method", f"{method}: bitsandbytes quantises the base here")
        if theirs.take("double_quantization") is False:
            translation.set("quantization.double_quant", False, "double_quantization")
        translation.copy("quantization.quant_type", "quantization_type")
    elif bits == 8:
        translation.set("adapter", "qlora", "quantization_bit")
        translation.set("quantization.quant_type", "int8", "quantization_bit")
        translation.differs("quantization_bit", words.INT8)
    else:
        raise theirs.refused("quantization_bit", "bases have 16 bits, or 4 or 8 by adapter: qlora")
    rank = theirs.take("lora_rank")
    alpha = theirs.take("lora_alpha")
    if rank is None:
        translation.default("lora.r", 8)
    else:
        translation.set("lora.r", rank, "lora_rank")
    if alpha is None:
        translation.default("lora.alpha", 2 * int(rank or 8))
    else:
        translation.set("lora.alpha", alpha, "lora_alpha")
    translation.copy_or("lora.dropout", 0.0, "lora_dropout")
    target = theirs.take("lora_target")
    listed = ["all-linear"] if target in (None, "all") else _listed(target)
    translation.set("lora.target_modules", listed, "lora_target")
    words.experts(translation)
    translation.copy("lora.modules_to_save", "additional_target")
    translation.copy("lora.rslora", "use_rslora")
    translation.copy("lora.dora", "use_dora")
    translation.copy("lora.adapter_path", "adapter_name_or_path")
    translation.copy("lora.loraplus_lr_ratio", "loraplus_lr_ratio")
    theirs.take("loraplus_lr_embedding", "create_new_adapter")
    if theirs.take("pissa_init") is True:
        steps = theirs.take("pissa_iter", default=16)
        translation.set("lora.init", "pissa" if steps == -1 else "pissa_niter_16", "pissa_init")


def _data(translation: Translation) -> None:
    theirs = translation.theirs
    plain = theirs.tree.get("stage") == "pt"
    names = _listed(theirs.take("dataset") or [])
    if not names:
        raise theirs.refused("dataset", "missing; nothing to train on")
    info = _dataset_info(translation)
    most = theirs.take("max_samples")
    sources = [_source(translation, info, name, plain=plain) for name in names]
    for source in sources:
        if most:
            source["max_samples"] = min(int(most), source.get("max_samples", int(most)))
    if len(sources) == 1:
        for key, value in sources[0].items():
            translation.set(f"dataset.{key}", value, "dataset")
    else:
        translation.set("dataset.mix", sources, "dataset")
    held_out = _listed(theirs.take("eval_dataset") or [])
    if held_out:
        translation.set("dataset.evaluation", _source(translation, info, held_out[0], plain=plain), "eval_dataset")
    share = theirs.take("val_size")
    if share and float(share) >= 1:
        raise theirs.refused("val_size", "a number of records; write a fraction of them, such as 0.05")
    if share:
        translation.set("dataset.val_split", share, "val_size")
    translation.copy_or("dataset.max_length", 2048, "cutoff_len")
    packing, neat = theirs.take("packing"), theirs.take("neat_packing")
    if packing or neat or (packing is None and plain):
        translation.set("dataset.packing", True, "neat_packing" if neat else "packing" if packing else "stage")
        if not neat:
            translation.differs("packing", "documents of a pack do not see each other here")
    if theirs.take("streaming") is True:
        translation.set("dataset.streaming", True, "streaming")
    if theirs.take("train_on_prompt") is True:
        translation.set("dataset.train_on", ["all"], "train_on_prompt")
    translation.copy("dataset.system_prompt", "default_system")
    template = theirs.take("template")
    if template in CHAT_TEMPLATES:
        translation.set("dataset.chat_template", CHAT_TEMPLATES[template], "template")
    elif template and not plain:
        translation.differs("template", f"{template}: the tokenizer's own template is used, which instruct models have")
    if str(template or "").endswith("_nothink") or theirs.has("enable_thinking"):
        translation.differs("template", "what the model thinks is learnt as the records have it")


def _dataset_info(translation: Translation) -> dict[str, Any]:
    theirs = translation.theirs
    place = str(theirs.take("dataset_dir", default="data"))
    if place.startswith(("REMOTE:", "ONLINE")):
        raise theirs.refused("dataset_dir", "a list of data sets on the hub; download it, and name its folder")
    for folder in (theirs.folder, *theirs.folder.parents):
        file = folder / place / "dataset_info.json"
        if file.is_file():
            translation.no_effect.append("dataset_dir") if "dataset_dir" in theirs.tree else None
            translation.theirs.taken.add("dataset_dir")
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise theirs.refused("dataset_dir", f"{file} is no JSON ({error})") from None
            return {"": str(file.parent), **content}
    raise theirs.refused(
        "dataset_dir" if "dataset_dir" in theirs.tree else "dataset",
        f"no {place}/dataset_info.json beside this file or above it; name its folder with --dataset-dir",
    )


def _source(translation: Translation, info: dict[str, Any], name: str, *, plain: bool) -> dict[str, Any]:
    """One entry of dataset_info.json."""
    theirs = translation.theirs
    entry = info.get(name)
    if not isinstance(entry, dict):
        raise theirs.refused("dataset", f"{name} is not in {info['']}/dataset_info.json")
    if entry.get("ranking"):
        raise theirs.refused("dataset", f"{name}: {PREFERENCES}")
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if any(columns.get(kind) for kind in MEDIA):
        raise theirs.refused("dataset", f"{name}: {VISION}")
    if columns.get("kto_tag"):
        raise theirs.refused("dataset", f"{name}: {PREFERENCES}")
    source: dict[str, Any] = _place(translation, entry, info[""], name)
    if entry.get("num_samples"):
        source["max_samples"] = int(entry["num_samples"])
    if plain:
        column = columns.get("prompt", "instruction" if entry.get("formatting") != "sharegpt" else "text")
        return source | {"format": "completion", "fields": {"text": column}}
    if entry.get("formatting", "alpaca") == "alpaca":
        return source | _alpaca(translation, columns)
    if entry.get("formatting") in ("sharegpt", "openai"):
        return source | _turns(columns, tags, openai=entry["formatting"] == "openai")
    raise theirs.refused("dataset", f"{name}: formatting {entry.get('formatting')} is not known")


def _place(translation: Translation, entry: dict[str, Any], folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if entry.get("hf_hub_url"):
        found["path"] = entry["hf_hub_url"]
    elif entry.get("file_name"):
        found["path"] = f"{folder}/{entry['file_name']}"
    elif entry.get("ms_hub_url") or entry.get("om_hub_url"):
        raise translation.theirs.refused(
            "dataset", f"{name}: ModelScope's and Modelers' hubs are not read; download it"
        )
    else:
        raise translation.theirs.refused("dataset", f"{name}: is made by a script; write it to a file")
    if entry.get("subset"):
        found["name"] = entry["subset"]
    if entry.get("split", "train") != "train":
        found["split"] = entry["split"]
    if entry.get("folder"):
        found["data_files"] = [f"{entry['folder']}/*"]
    return found


def _alpaca(translation: Translation, columns: dict[str, str]) -> dict[str, Any]:
    theirs = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
    fields = {ours: columns[name] for ours, name in theirs.items() if columns.get(name) and columns[name] != ours}
    if not columns or columns.get("query"):
        text = "instruction and input are joined by an empty line, there by a line break"
        if all(remark.text != text for remark in translation.different):
            translation.differs("dataset", text)
    return {"format": "alpaca", **({"fields": fields} if fields else {})}


def _turns(columns: dict[str, str], tags: dict[str, str], *, openai: bool) -> dict[str, Any]:
    role = tags.get("role_tag", "role" if openai else "from")
    content = tags.get("content_tag", "content" if openai else "value")
    fields = {"messages": columns.get("messages", "messages" if openai else "conversations")}
    fields |= {key: name for key, name in (("role", role), ("content", content)) if key != name}
    fields |= {key: columns[key] for key in ("system", "tools") if columns.get(key) and columns[key] != key}
    theirs = {"user": "human", "assistant": "gpt", "system": "system"}
    roles: dict[str, list[str]] = {}
    for ours, default in theirs.items():
        word = tags.get(f"{ours}_tag")
        if word and word.lower() not in (ours, default):
            roles[ours] = [word]
    return {"format": "messages", "fields": fields, **({"roles": roles} if roles else {})}


def _training(translation: Translation) -> None:
    theirs = translation.theirs
    for ours, name, default in (
        ("training.batch_size", "per_device_train_batch_size", 8),
        ("training.gradient_accumulation_steps", "gradient_accumulation_steps", 1),
        ("training.learning_rate", "learning_rate", 5e-5),
        ("training.epochs", "num_train_epochs", 3.0),
        ("training.lr_scheduler", "lr_scheduler_type", "linear"),
        ("training.save_steps", "save_steps", 500),
    ):
        if name == "lr_scheduler_type" and theirs.take(name):
            words.schedule(translation, name)
        elif not translation.copy(ours, name):
            translation.default(ours, default)
    translation.copy("training.max_steps", "max_steps")
    if translation.settings.get("training.max_steps") and translation.settings["training.max_steps"].value == -1:
        del translation.settings["training.max_steps"]
    words.warmup(translation)
    if not {"training.warmup_ratio", "training.warmup_steps"} & translation.settings.keys():
        translation.default("training.warmup_steps", 0)
    words.optimizer(translation, "optim")
    if theirs.take("pure_bf16") is True:
        translation.set("training.precision", "bf16", "pure_bf16")
        theirs.take("bf16", "fp16")
    else:
        words.precision(translation)
    for name in ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"):
        translation.copy(f"training.{name}", name)
    translation.copy("training.eval_batch_size", "per_device_eval_batch_size")
    translation.copy("seed", "seed")
    if theirs.take("disable_gradient_checkpointing") is True:
        translation.set("training.gradient_checkpointing", "none", "disable_gradient_checkpointing")
    else:
        translation.default("training.gradient_checkpointing", "non_reentrant")
    if not translation.copy("training.save_total_limit", "save_total_limit"):
        translation.default("training.save_total_limit", None)
    held_out = {"dataset.val_split", "dataset.evaluation"} & translation.settings.keys()
    strategy, every = theirs.take("eval_strategy", "evaluation_strategy"), theirs.take("eval_steps")
    if held_out and strategy == "epoch":
        translation.set("training.evals_per_epoch", 1, "eval_strategy")
    elif held_out and every:
        translation.set("training.eval_steps", every, "eval_steps")
    if not translation.copy("output_dir", "output_dir"):
        translation.default(
            "output_dir", "runs/" + re.sub(r"[^\w.-]+", "-", str(theirs.tree.get("model_name_or_path")))
        )
    if theirs.take("overwrite_output_dir") is True:
        translation.set("output.overwrite", True, "overwrite_output_dir")
    translation.copy("training.resume_from_checkpoint", "resume_from_checkpoint")
    if theirs.take("neftune_noise_alpha"):
        translation.leave_out("neftune_noise_alpha", "noise on embeddings")


def _listed(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]
