"""Axolotl's YAML: what each of its settings is here, and its defaults where ours are others."""

import re

from launcher.importing import common_words as words
from launcher.importing.axolotl_sources import take_data
from launcher.importing.translation import Setting, Theirs, Translation

PREFERENCES = "preference and reward training are not offered"
# Setting -> why a file that has it cannot be had here. In the order in which a reader would give the reason.
REFUSED = {
    "rl": PREFERENCES,
    "reward_model": PREFERENCES,
    "process_reward_model": PREFERENCES,
    "ebft": "training by generated continuations (EBFT) is not offered",
    "gptq": "a GPTQ base is not offered; `adapter: qlora` quantises the 16-bit model",
    "qat": "quantisation-aware training is not offered",
    "relora": "ReLoRA is not offered",
    "lisa_step_interval": "LISA is not offered",
    "use_pose": "PoSE is not offered",
    "diffusion": "diffusion language models are not offered",
    "llmcompressor": "sparse fine-tuning is not offered",
    "kd_trainer": "distillation is not offered",
    "use_eaft": "the loss of EAFT is not offered",
    "lr_groups": "learning rates of single modules are not offered",
    "lora_rank_pattern": "a rank of each layer's own is not offered",
    "lora_alpha_pattern": "a scale of each layer's own is not offered",
    "peft_layers_to_transform": "adapters on some layers alone: name the others in lora.exclude_modules by hand",
}
PLUGINS_REFUSED = {
    "Diffusion": "diffusion language models are not offered",
    "LLMCompressor": "sparse fine-tuning is not offered",
    "KD": "distillation is not offered",
    "Spectrum": "Spectrum is not offered",
    "GrokFast": "Grokfast is not offered",
}
WITHOUT_EFFECT = (
    "plugins strict dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory debug "
    "push_dataset_to_hub hf_use_auth_token model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
    "pad_to_sequence_len pad_to_multiple_of eval_sample_packing group_by_length multipack_real_batches "
    "gradient_checkpointing_kwargs ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_find_unused_parameters local_rank world_size device device_map max_memory low_cpu_mem_usage "
    "logging_steps save_strategy save_first_step save_safetensors save_only_model flash_attn_cross_entropy "
    "flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum is_llama_derived_model is_mistral_derived_model "
    "is_falcon_derived_model is_qwen_derived_model use_kernels use_scattermoe use_sonicmoe experts_implementation "
    "cut_cross_entropy chunked_cross_entropy unsloth_cross_entropy_loss fused_attn_kernel torchdistx_path "
    "loss_watchdog_threshold loss_watchdog_patience auto_resume_from_checkpoints eot_tokens use_wandb "
    "remove_unused_columns dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
    "dataloader_drop_last flex_attn_compile_kwargs torch_compile_backend torch_compile_mode gc_steps "
    "gc_collect_steps torch_empty_cache_steps tokenizer_use_mistral_common lora_fan_in_fan_out lora_on_cpu "
    "quantize_moe_experts qlora_sharded_model_loading max_packed_sequence_len llama4_linearized_experts "
    "gemma4_hybrid_attn_impl experimental_skip_move_to_device dp_shard_size fp32_norms include_tkps "
    "eval_table_size eval_max_new_tokens test_value lora_mlp_kernel expert_parallel_size processor_type "
    "freeze_mm_modules resize_token_embeddings_to_32x shuffle_merged_datasets lora_modules "
    "min_sample_len sample_packing_group_size sample_packing_bin_size pretrain_multipack_attn "
    "pretrain_multipack_buffer_size streaming_multipack_buffer_size use_otel_metrics ray_num_workers use_ray"
).split()
PREFIXES = (
    "liger_", "wandb_", "gptq_", "trackio_", "mlflow_", "comet_", "swanlab_", "otel_", "use_swanlab", "ray_",
    "lora_qkv_", "lora_o_", "lora_embedding_", "use_dsv4", "dsv4_", "use_glm_", "nvfp4_", "expert_parallel_", "tiled_",
    "vllm", "trl", "heads_k_",
)  # fmt: skip


def translate(theirs: Theirs) -> Translation:
    """Ours from Axolotl's. Raises Refused for what is not offered here."""
    translation = Translation(theirs)
    _refuse(theirs)
    _model(translation)
    _adapter(translation)
    take_data(translation)
    _training(translation)
    _steps_and_saves(translation)
    words.fsdp(translation)
    words.deepspeed(translation)
    _layout(translation)
    _reports(translation)
    translation.finish(WITHOUT_EFFECT, PREFIXES)
    return translation


def _refuse(theirs: Theirs) -> None:
    for name, reason in REFUSED.items():
        if theirs.has(name):
            raise theirs.refused(name, reason)
    stored = theirs.take("model_quantization_config")
    if stored and not (theirs.take("model_quantization_config_kwargs") or {}).get("dequantize"):
        raise theirs.refused("model_quantization_config", "the base stays as it is stored; take the 16-bit model")
    for plugin in theirs.tree.get("plugins") or []:
        for part, reason in PLUGINS_REFUSED.items():
            if f".{part}" in str(plugin):
                raise theirs.refused("plugins", f"{plugin}: {reason}")
    name = str(theirs.tree.get("base_model") or "")
    if found := words.QUANTIZED_NAMES.search(name):
        raise theirs.refused("base_model", f"its weights are in {found.group(1)}; name the 16-bit model")


def _model(translation: Translation) -> None:
    theirs = translation.theirs
    if not translation.copy("base_model", "base_model"):
        raise theirs.refused("base_model", "missing; a model must be named")
    theirs.take("base_model_config")
    translation.copy("model.revision", "revision_of_model")
    translation.copy("model.tokenizer", "tokenizer_config")
    translation.copy("model.trust_remote_code", "trust_remote_code")
    words.attention(
        translation, "attn_implementation", "flash_attention", "xformers_attention", "sdp_attention", "flex_attention",
        "eager_attention", "sage_attention",
    )  # fmt: skip
    if isinstance(theirs.tree.get("tokens"), dict):  # as special_tokens was called
        special = theirs.take("tokens")
    else:
        translation.copy("model.added_tokens", "tokens")
        special = theirs.take("special_tokens")
    if isinstance(special, dict):
        if special.get("pad_token"):
            translation.set("model.pad_token", special["pad_token"], "special_tokens")
        if others := [name for name in special if name != "pad_token" and special[name]]:
            translation.differs(
                "special_tokens", f"{', '.join(others)}: the tokenizer's own are kept; chats end as the template says"
            )
    config = theirs.take("model_config", "overrides_of_model_config")
    if config:
        name = theirs.has("model_config", "overrides_of_model_config") or "model_config"
        translation.leave_out(name, "changes of the model's own configuration: edit a copy of its config.json")


def _adapter(translation: Translation) -> None:
    theirs = translation.theirs
    kind = theirs.take("adapter")
    four, eight = theirs.take("load_in_4bit") is True, theirs.take("load_in_8bit") is True
    if kind not in (None, "lora", "qlora"):
        raise theirs.refused("adapter", "adapters here are lora and qlora")
    if kind is None:
        translation.settings["adapter"] = Setting("none", "no adapter there")
        if theirs.has("unfrozen_parameters"):
            raise theirs.refused(
                "unfrozen_parameters", "training a part of the weights is not offered; use adapter: lora"
            )
        return
    theirs.take("unfrozen_parameters")  # all of the base is frozen below an adapter
    loftq = (theirs.take("peft") or {}).get("loftq_config") or theirs.take("loftq_config")
    eight = eight and not four and not loftq
    translation.set("adapter", "qlora" if four or eight or kind == "qlora" or loftq else "lora", "adapter")
    if eight:
        translation.set("quantization.quant_type", "int8", "load_in_8bit")
        translation.differs("load_in_8bit", words.INT8)
    if loftq:
        translation.set("lora.init", "loftq", "peft")
    translation.copy("lora.r", "lora_r")
    translation.copy("lora.alpha", "lora_alpha")
    translation.copy_or("lora.dropout", 0.0, "lora_dropout")
    _targets(translation)
    translation.copy("lora.modules_to_save", "lora_modules_to_save")
    translation.copy("lora.rslora", "peft_use_rslora")
    translation.copy("lora.dora", "peft_use_dora")
    translation.copy("lora.adapter_path", "lora_model_dir")
    translation.copy("lora.loraplus_lr_ratio", "loraplus_lr_ratio")
    theirs.take("loraplus_lr_embedding")
    if start := theirs.take("peft_init_lora_weights"):
        translation.set("lora.init", "default" if start is True else start, "peft_init_lora_weights")
    double = (theirs.take("bnb_config_kwargs") or {}).get("bnb_4bit_use_double_quant", True)
    if translation.settings["adapter"].value == "qlora" and not double and not eight:
        translation.set("quantization.double_quant", False, "bnb_config_kwargs")


def _targets(translation: Translation) -> None:
    theirs = translation.theirs
    linear, names = theirs.take("lora_target_linear") is True, theirs.take("lora_target_modules")
    if linear:
        translation.set("lora.target_modules", ["all-linear"], "lora_target_linear")
    elif isinstance(names, str) and not re.fullmatch(r"[\w.-]+", names):
        found = names_in_pattern(names)
        if not found:
            raise theirs.refused("lora_target_modules", "a pattern of paths; name the layers by the last part of each")
        translation.set("lora.target_modules", found, "lora_target_modules")
        translation.differs("lora_target_modules", "the pattern becomes these names, in the language model alone")
    elif names:
        translation.set(
            "lora.target_modules", [names] if isinstance(names, str) else list(names), "lora_target_modules"
        )
    else:
        translation.default("lora.target_modules", ["q_proj", "v_proj"])
        translation.differs("adapter", "no targets are named: PEFT takes q_proj and v_proj in most models, written out")
    words.experts(translation, "lora_target_parameters")


def names_in_pattern(pattern: str) -> list[str]:
    """`(q|k)_proj` and `o_proj` at the ends of a pattern of paths."""
    groups = [(match.group(1).split("|"), match.group(2)) for match in re.finditer(r"\(([\w|]+)\)(_proj)", pattern)]
    single = re.findall(r"(?<![\w|)])(\w+_proj)\b", pattern)
    return list(dict.fromkeys([f"{part}{end}" for parts, end in groups for part in parts] + single))


def _training(translation: Translation) -> None:
    theirs = translation.theirs
    translation.copy_or("training.batch_size", 1, "micro_batch_size")
    together, micro = theirs.take("batch_size"), theirs.tree.get("micro_batch_size") or 1
    if not translation.copy("training.gradient_accumulation_steps", "gradient_accumulation_steps") and together:
        translation.set("training.gradient_accumulation_steps", max(1, int(together) // int(micro)), "batch_size")
    translation.copy("training.eval_batch_size", "eval_batch_size")
    translation.copy("training.learning_rate", "learning_rate")
    words.schedule(translation, "lr_scheduler")
    words.warmup(translation)
    words.optimizer(translation, "optimizer")
    words.precision(translation)
    for name in ("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2"):
        translation.copy(f"training.{name}", name)
    translation.copy("training.adam_epsilon", "adam_epsilon", "adam_eps")
    translation.copy("seed", "seed")
    again, away = theirs.take("gradient_checkpointing"), theirs.take("activation_offloading")
    theirs.take("gradient_checkpointing_kwargs")
    if again or away:
        translation.set("training.gradient_checkpointing", "non_reentrant", "gradient_checkpointing")
    if away or again in ("offload", "offload_disk"):
        name = "activation_offloading" if away else "gradient_checkpointing"
        translation.set("training.offload_activations", True, name)
    if theirs.take("torch_compile") is True:
        translation.set("training.torch_compile", True, "torch_compile")


def _steps_and_saves(translation: Translation) -> None:
    theirs = translation.theirs
    translation.copy("training.max_steps", "max_steps")
    translation.copy("training.epochs", "num_epochs")
    held_out = "dataset.val_split" in translation.settings or "dataset.evaluation" in translation.settings
    streams = "dataset.streaming" in translation.settings
    for kind, saves in (("save", True), ("eval", False)):
        steps, each = theirs.take(f"{kind}_steps"), theirs.take(f"{kind}s_per_epoch")
        strategy = theirs.take(f"{kind}_strategy")
        if not (saves or held_out):
            continue
        if isinstance(steps, float) and 0 < steps < 1:
            epochs = float(theirs.tree.get("num_epochs") or 1)
            translation.set(f"training.{kind}s_per_epoch", round(1 / (steps * epochs), 6), f"{kind}_steps")
        elif steps:
            translation.set(f"training.{kind}_steps", int(steps), f"{kind}_steps")
        elif strategy == "no" or each == 0:
            translation.set(f"training.{kind}_steps", 0, f"{kind}_strategy" if strategy else f"{kind}s_per_epoch")
        elif streams:
            continue
        elif each:
            translation.set(f"training.{kind}s_per_epoch", each, f"{kind}s_per_epoch")
        else:
            translation.default(f"training.{kind}s_per_epoch", 1)
    translation.copy_or("training.save_total_limit", 4, "save_total_limit")
    patience = theirs.take("early_stopping_patience")
    best = theirs.take("load_best_model_at_end")
    if held_out and not streams:
        if patience:
            translation.set("training.early_stopping", patience, "early_stopping_patience")
        if best:
            translation.set("training.best_checkpoint", True, "load_best_model_at_end")
    translation.copy("training.resume_from_checkpoint", "resume_from_checkpoint")
    if not translation.copy("output_dir", "output_dir"):
        translation.default("output_dir", "./model-out")


def _layout(translation: Translation) -> None:
    """How the work is laid out over GPUs, which does not change what is computed."""
    for name in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"):
        value = translation.theirs.take(name)
        if value not in (None, 1):
            translation.differs(name, "every GPU holds whole sequences and layers; zero.stage 3 partitions the weights")


def _reports(translation: Translation) -> None:
    theirs = translation.theirs
    project, wanted = theirs.take("wandb_project"), theirs.take("use_wandb")
    theirs.take("use_tensorboard")
    if project and wanted is not False:
        translation.set("logging.report_to", ["wandb"], "wandb_project")
        translation.set("logging.project", project, "wandb_project")
    translation.copy("logging.run_name", "wandb_name", "wandb_run_id")
    for name in ("hub_model_id", "hub_strategy"):
        if theirs.has(name):
            translation.leave_out(name, "upload with `zerolora push RUN REPO` after training")
