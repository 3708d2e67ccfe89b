"""Axolotl's YAML: our settings for its keys, and its defaults where they differ from ours."""

import re
from typing import Literal

from launcher.importing import common
from launcher.importing.axolotl_sources import SOURCES, set_data
from launcher.importing.translation import Foreign, Key, Number, Text, Translation, Whole, make_table, split_names

DIFFUSION = "diffusion language models are not supported"
SPARSE, DISTILLATION = "sparse fine-tuning is not supported", "distillation is not supported"
RL = ("dpo", "ipo", "simpo", "orpo", "kto")

EAFT_SCALE = "the entropy is divided by 3, as in LLaMA-Factory, so that losses are smaller by this factor"

KEYS = common.SHARED | make_table(
    """
    copy base_model revision_of_model=model.revision tokenizer_config lora_r lora_alpha lora_dropout:0.0 lora_model_dir
    copy lora_modules_to_save peft_use_rslora peft_use_dora sequence_len:512 sample_packing lora_target_modules
    copy micro_batch_size:1 eval_batch_size num_epochs adam_eps=training.adam_epsilon save_total_limit:4
    copy output_dir:./model-out wandb_name=logging.run_name wandb_run_id=logging.run_name
    copy special_tokens.pad_token=model.pad_token default_system_message=dataset.system_prompt val_set_size!0
    copy rl_beta=preference.beta orpo_alpha=preference.beta dpo_label_smoothing=preference.label_smoothing
    copy simpo_gamma=preference.gamma kto_desirable_weight=preference.desirable_weight
    copy kto_undesirable_weight=preference.undesirable_weight
    copy bnb_config_kwargs.bnb_4bit_use_double_quant=quantization.double_quant early_stopping_patience
    copy eaft_alpha noisy_embedding_alpha=training.neftune_noise_alpha
    flag load_in_4bit load_in_8bit model_quantization_config_kwargs.dequantize streaming skip_prepare_dataset bfloat16
    flag float16 use_wandb
    text model_quantization_config chat_template chat_template_jinja train_on_eos train_on_eot processor_type
    text wandb_project
    flag-or-text attn_implementation flash_attention xformers_attention sdp_attention flex_attention eager_attention
    flag-or-text sage_attention peft_init_lora_weights
    whole batch_size context_parallel_size!1 sequence_parallel_degree!1 tensor_parallel_size!1
    number cosine_min_lr_ratio saves_per_epoch evals_per_epoch
    names plugins lora_target_parameters roles_to_train unfrozen_parameters
    none strict dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory debug base_model_config
    none push_dataset_to_hub hf_use_auth_token model_type tokenizer_type tokenizer_use_fast tokenizer_legacy float32
    none pad_to_sequence_len pad_to_multiple_of eval_sample_packing group_by_length multipack_real_batches
    none ddp ddp_bucket_cap_mb ddp_broadcast_buffers local_rank world_size device
    none device_map max_memory use_tensorboard save_first_step save_safetensors flash_attn_cross_entropy fsdp_version
    none flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum is_llama_derived_model is_mistral_derived_model
    none is_falcon_derived_model is_qwen_derived_model use_kernels use_scattermoe use_sonicmoe experts_implementation
    none cut_cross_entropy chunked_cross_entropy unsloth_cross_entropy_loss fused_attn_kernel torchdistx_path
    none loss_watchdog_threshold loss_watchdog_patience eot_tokens fsdp_final_state_dict_type remove_unused_columns
    none dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last flex_attn_compile_kwargs
    none torch_compile_backend torch_compile_mode gc_steps gc_collect_steps torch_empty_cache_steps
    none tokenizer_use_mistral_common lora_fan_in_fan_out lora_on_cpu quantize_moe_experts qlora_sharded_model_loading
    none max_packed_sequence_len llama4_linearized_experts gemma4_hybrid_attn_impl experimental_skip_move_to_device
    none dp_shard_size fp32_norms include_tkps eval_table_size eval_max_new_tokens test_value lora_mlp_kernel
    none freeze_mm_modules resize_token_embeddings_to_32x shuffle_merged_datasets lora_modules
    none min_sample_len sample_packing_group_size sample_packing_bin_size pretrain_multipack_attn use_otel_metrics
    none pretrain_multipack_buffer_size streaming_multipack_buffer_size use_ray
    none fsdp_transformer_layer_cls_to_wrap pretraining_sample_concatenation liger_* gptq_* trackio_* mlflow_* comet_*
    none swanlab_* otel_* use_swanlab* ray_* lora_qkv_* lora_o_* lora_embedding_* use_dsv4* dsv4_* use_glm_* nvfp4_*
    none expert_parallel_* tiled_* vllm* trl* heads_k_*
    """,
    {
        "reward_model": common.PREFERENCES,
        "process_reward_model": common.PREFERENCES,
        "ebft": "training by generated continuations (EBFT) is not supported",
        "gptq": "a GPTQ base is not supported; `adapter: qlora` quantises the 16-bit model",
        "qat": "its number formats are not those of training.qat, which trains for int8 or int4 weights",
        "relora": "ReLoRA is not supported",
        "lisa_step_interval": "LISA is not supported",
        "use_pose": "PoSE is not supported",
        "diffusion": DIFFUSION,
        "llmcompressor": SPARSE,
        "kd_trainer": DISTILLATION,
        "lr_groups": "learning rates of single modules are not supported",
        "peft_layers_to_transform": "adapters on some layers only: list the others in lora.exclude_modules",
    },
    {
        "dataset_exact_deduplication": "copies are counted and reported, not removed",
        **dict.fromkeys(("model_config", "overrides_of_model_config"), "edit a copy of the model's config.json"),
        **dict.fromkeys(
            ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"),
            "every GPU holds whole sequences and layers; zero.stage 3 partitions the weights",
        ),
    },
    {
        "adapter": Key(Text, "adapter", "none", values={"lora": "lora", "qlora": "qlora"}, otherwise=common.ONLY_LORA),
        "rl": Key(Text | Literal[False], values={name: name for name in RL}, otherwise=common.PREFERENCES),
        "lora_target_linear": Key(bool, "lora.target_modules", values={"true": ["all-linear"]}),
        "tokens": Key(([Text], {"pad_token": Text})),  # an older name of special_tokens
        "lora_rank_pattern": Key({"*": Whole}, "lora.rank_pattern"),
        "lora_alpha_pattern": Key({"*": Number}, "lora.alpha_pattern"),
        "peft.loftq_config": Key({"*": Whole}),
        "loftq_config": Key({"*": Whole}),
        "datasets": Key(SOURCES),
        "test_datasets": Key(SOURCES),
        "pretraining_dataset": Key(SOURCES),
        "excess_length_strategy": Key(
            Text,
            "dataset.too_long",
            "drop",
            values={"drop": "drop", "truncate": "cut", "raise": "drop"},
            otherwise="must be drop, truncate or raise",
            notes={"raise": "records that are too long are left out, and counted"},
        ),
        "train_on_inputs": common.EVERY_TOKEN,
        "use_eaft": Key(bool, "training.loss", values={"true": "eaft"}, notes={"true": EAFT_SCALE}),
        "eaft_k": Key(Whole, left_out="the entropy is that of the 20 most probable tokens", unless=(20,)),
        "sample_packing_sequentially": common.FIXED_ORDER,
        "curriculum_sampling": common.FIXED_ORDER,
        "chat_template_kwargs": Key({"*": bool | Whole | Number | Text}),
        "lr_scheduler": Key(Text, "training.lr_scheduler", values=common.SCHEDULES, otherwise=common.ONLY_SCHEDULES),
        "optimizer": common.OPTIMIZER,
        "gradient_checkpointing": Key(bool | Literal["offload", "offload_disk"]),
        "activation_offloading": Key(bool | Literal["legacy", "disk", "hidden_states"]),
        "torch_compile": Key(bool | Literal["auto"], "training.torch_compile", unless=("auto",)),
        "auto_resume_from_checkpoints": Key(bool, "training.resume_from_checkpoint", values={"true": "auto"}),
    },
)
PLUGINS_REFUSED = {
    "Diffusion": DIFFUSION,
    "LLMCompressor": SPARSE,
    "KD": DISTILLATION,
    "Spectrum": "Spectrum is not supported",
    "GrokFast": "Grokfast is not supported",
}


def translate(foreign: Foreign) -> Translation:
    """Return our settings for a configuration of Axolotl."""
    t = Translation(foreign, KEYS)
    set_model(t)
    set_adapter(t)
    set_data(t)
    set_training(t)
    set_saves_and_evaluations(t)
    if (rl := str(t.get("rl")).lower()) in RL:
        common.set_preference(t, rl, "sequence_len", "rl")
    else:
        t.drop("preference.")
    common.set_distribution(t)
    return t


def set_model(t: Translation) -> None:
    """Set the base model and its tokens; refuse unsupported bases and plugins."""
    common.name_model(t, "base_model")
    if t.get("model_quantization_config") and not t.get("model_quantization_config_kwargs.dequantize"):
        t.refuse("model_quantization_config", "the base stays as it is stored; take the 16-bit model")
    for plugin in split_names(t.get("plugins")):
        for part, reason in PLUGINS_REFUSED.items():
            if f".{part}" in plugin:
                t.refuse("plugins", f"{plugin}: {reason}")
    common.set_attention(
        t, "attn_implementation", "flash_attention", "xformers_attention", "sdp_attention", "flex_attention",
        "eager_attention", "sage_attention",
    )  # fmt: skip
    if isinstance(t.get("tokens"), list):
        t.put("model.added_tokens", t.get("tokens"), "tokens")
    elif t.get("tokens", {}).get("pad_token"):
        t.put("model.pad_token", t.get("tokens")["pad_token"], "tokens")
    for name in ("tokens", "special_tokens"):
        tokens = t.foreign.tree.get(name)
        if others := [str(token) for token in tokens if token != "pad_token"] if isinstance(tokens, dict) else []:
            t.note(name, f"{', '.join(others)}: the tokenizer's own are kept; the template ends chats")


def set_adapter(t: Translation) -> None:
    """Set the bits of the base, where the adapter starts, and which layers get one."""
    loftq = t.get("peft.loftq_config") or t.get("loftq_config")
    if t.get_setting("adapter") == "none":
        if t.get("unfrozen_parameters"):
            t.refuse("unfrozen_parameters", "training a part of the weights is not supported; use adapter: lora")
    elif t.get("load_in_4bit") or t.get("load_in_8bit") or loftq:
        t.put("adapter", "qlora", "adapter", "load_in_4bit")
    if t.get("load_in_8bit") and not t.get("load_in_4bit") and not loftq and t.get_setting("adapter") != "none":
        t.put("quantization.quant_type", "int8", "load_in_8bit")
        t.note("load_in_8bit", common.INT8)
    start = t.get("peft_init_lora_weights")
    if loftq or start:
        chosen = "loftq" if loftq else "default" if start is True else start
        t.put("lora.init", chosen, "peft.loftq_config", "loftq_config", "peft_init_lora_weights")
    pattern = t.get("lora_target_modules")
    common.set_default_targets(t, "adapter")
    if isinstance(pattern, str) and not re.fullmatch(r"[\w.,\s-]+", pattern) and not t.get("lora_target_linear"):
        found = find_names(pattern)
        t.put("lora.target_modules", found or [pattern], "lora_target_modules")
        if found:
            t.note("lora_target_modules", "the pattern becomes these names, in the language model only")
    common.set_experts(t)


def find_names(pattern: str) -> list[str]:
    """Return the module names at the end of a pattern of paths, such as `(q|k)_proj` and `o_proj`."""
    groups = re.findall(r"\(([\w|]+)\)(_proj)", pattern)
    single = re.findall(r"(?<![\w|)])(\w+_proj)\b", pattern)
    return list(dict.fromkeys([part + end for parts, end in groups for part in parts.split("|")] + single))


def set_training(t: Translation) -> None:
    """Set batches, schedule, precision and recomputation."""
    if t.get("batch_size") and not t.get("gradient_accumulation_steps"):
        steps = t.get("batch_size") // max(1, t.get("micro_batch_size", 1))
        t.put("training.gradient_accumulation_steps", max(1, steps), "batch_size")
    min_ratio = t.get("cosine_min_lr_ratio")
    if min_ratio is not None and min_ratio >= 1:
        t.put("training.lr_scheduler", "constant_with_warmup", "cosine_min_lr_ratio", "lr_scheduler")
    elif min_ratio is not None:
        t.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler")
        t.put("training.min_lr_ratio", min_ratio, "cosine_min_lr_ratio")
    common.set_warmup(t)
    common.set_precision(t)
    checkpointing, offloading = t.get("gradient_checkpointing"), t.get("activation_offloading")
    if checkpointing or offloading:
        t.put("training.gradient_checkpointing", "non_reentrant", "gradient_checkpointing")
    if offloading or checkpointing in ("offload", "offload_disk"):
        t.put("training.offload_activations", True, "activation_offloading", "gradient_checkpointing")


def set_saves_and_evaluations(t: Translation) -> None:
    """Set when to save and evaluate (once an epoch by default), when to stop, and where to report."""
    each_epoch = None if t.get_setting("dataset.streaming") else ("s_per_epoch", 1)
    common.set_saves_and_evaluations(t, each_epoch, each_epoch)
    if t.get("wandb_project") and t.get("use_wandb") is not False:
        t.put("logging.report_to", ["wandb"], "wandb_project", "use_wandb")
        t.put("logging.project", t.get("wandb_project"), "wandb_project")
