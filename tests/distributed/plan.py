"""Which runs the distributed tests make; the tests say what must be true of them."""

from typing import Any


def case(name: str, **overrides: Any) -> dict[str, Any]:
    """`zero__stage=2` stands for the setting zero.stage."""
    return {"name": name, "overrides": {key.replace("__", "."): value for key, value in overrides.items()}}


STAGES = (0, 1, 2, 3)
# Smaller tensors bitsandbytes keeps in 32 bits.
ADAM8 = {"training__optimizer": "adamw_8bit", "lora__r": 32}
CHECKPOINTING = ("none", "non_reentrant", "selective")
# Every stage with every way of recomputing, and each of these with both adapters and both forwards; all three of layers
# are in test_layer_shards.py.
PAIRS: dict[str, tuple[str, int, str, str]] = {
    f"{adapter}-{stage}-{checkpointing}": (adapter, stage, checkpointing, backend)
    for stage in STAGES
    for index, checkpointing in enumerate(CHECKPOINTING)
    for adapter in [("lora", "qlora")[(stage + index) % 2]]
    for backend in [("auto", "reference")[(stage % 2 + index // 2) % 2]]
}
# What a resumed run must continue to the bit.
RESUMES: dict[str, dict[str, Any]] = {
    "lora-stage2-fp32": {"zero__stage": 2},
    "lora-stage0-bf16": {"zero__stage": 0, "training__precision": "bf16"},
    "lora-stage3-bf16": {"zero__stage": 3, "training__precision": "bf16"},
    "qlora-stage0-fp32": {"zero__stage": 0, "adapter": "qlora"},
    "qlora-stage3-bf16": {"zero__stage": 3, "adapter": "qlora", "training__precision": "bf16"},
    "fp8-stage3-bf16": {
        "zero__stage": 3,
        "adapter": "qlora",
        "quantization__quant_type": "fp8",
        "training__precision": "bf16",
    },
    "qat8-stage2-fp32": {"zero__stage": 2, "training__qat": "int8"},
    "qat4-stage3-bf16": {"zero__stage": 3, "training__qat": "int4", "training__precision": "bf16"},
    "adam8-stage2-fp32": {"zero__stage": 2, "training__optimizer": "adamw_8bit", "lora__r": 32},
}


def _equal_losses() -> list[dict[str, Any]]:
    cases = [
        case(
            name,
            adapter=adapter,
            zero__stage=stage,
            training__gradient_checkpointing=checkpointing,
            ops__backend=backend,
        )
        for name, (adapter, stage, checkpointing, backend) in PAIRS.items()
    ]
    cases += [case(f"full-{stage}", adapter="none", zero__stage=stage) for stage in STAGES]
    cases += [case(f"packed-{stage}", dataset__packing=True, zero__stage=stage) for stage in (2, 3)]
    cases += [case(f"tiled-{stage}", dataset__packing=True, zero__stage=stage, **TILED) for stage in (2, 3)]
    return cases


def _resumes() -> list[dict[str, Any]]:
    cases = []
    for name, settings in RESUMES.items():
        settings = {"lora__dropout": 0.1, "training__max_steps": 6, "training__save_steps": 3, **settings}
        cases.append(case(f"whole-{name}", **settings))
        again = {"training__resume_from_checkpoint": f"whole-{name}/checkpoint-3", "output_dir": f"again-{name}"}
        cases.append(case(f"again-{name}", **settings, **again))
    return cases


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"lora__rslora": True},
    "dora": {"lora__dora": True},
    "dora-qlora": {"lora__dora": True, "adapter": "qlora"},
    "modules_to_save": {"lora__modules_to_save": "lm_head"},
    "biased": {"base_model": "biased"},
    "some-targets": {"lora__target_modules": "q_proj,v_proj"},
    "adam8": {"training__optimizer": "adamw_8bit"},
    "fp4": {
        "adapter": "qlora",
        "quantization__quant_type": "fp4",
        "quantization__double_quant": False,
        "quantization__block_size": 128,
    },
    "nf4-fused": {
        "adapter": "qlora",
        "quantization__double_quant": False,
        "quantization__block_size": 128,
        "ops__backend": "reference",
    },
    "fp8": {"adapter": "qlora", "quantization__quant_type": "fp8", "ops__backend": "reference"},
    "int8": {"adapter": "qlora", "quantization__quant_type": "int8", "ops__backend": "reference"},
    "clipped": {"training__max_grad_norm": 0.05},
}

TILED: dict[str, Any] = {
    "training__gradient_checkpointing": "non_reentrant",
    "training__tiled_mlp": 16,
    "training__recompute_attention": False,
}

ROUNDED: dict[str, dict[str, Any]] = {
    "module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
    "packed-2": {"zero__stage": 2, "dataset__packing": True},
    "packed-3": {"zero__stage": 3, "dataset__packing": True},
    "recomputed": {"zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "dropout": {"zero__stage": 2, "lora__dropout": 0.3},
    "dropout-again": {"zero__stage": 3, "lora__dropout": 0.3, "training__gradient_checkpointing": "selective"},
}

# Training on pairs of answers: one global batch of 8 pairs, in every place.
PAIRED: dict[str, Any] = {
    "task": "preference",
    "dataset__path": "pairs.jsonl",
    "dataset__evaluation__path": "pairs.jsonl",
    "dataset__max_length": 128,
}
PREFERENCES: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero__stage": stage} for stage in STAGES},
    "operators": {"ops__backend": "reference", "zero__stage": 3},
    "recomputed": {"training__gradient_checkpointing": "non_reentrant", "zero__stage": 3},
    "by-module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
    "cached": {"preference__reference": "cached", "zero__stage": 3},
    "by-tokens": {"dataset__batching": "tokens"},
    "shared": {"preference__share_prompt": True, "zero__stage": 3},
}
"""Settings that change nothing."""
OTHER_PREFERENCES: dict[str, dict[str, Any]] = {
    "packed2": {"dataset__packing": True, "zero__stage": 2},
    "packed3": {"dataset__packing": True, "zero__stage": 3},
    "packed-cached": {"dataset__packing": True, "preference__reference": "cached"},
    "nf4-0": {"adapter": "qlora", "zero__stage": 0},
    "nf4-3": {
        "adapter": "qlora", "zero__stage": 3, "ops__backend": "reference", "preference__share_prompt": True,
    },
    "dropout": {"lora__dropout": 0.3, "zero__stage": 2},
    "dropout-recomputed": {
        "lora__dropout": 0.3, "zero__stage": 2, "training__gradient_checkpointing": "non_reentrant",
    },
    "kl": {"scu__enabled": True, "scu__measure": "kl", "scu__reference": "train.jsonl", "dataset__packing": True},
    "whole": {"training__max_steps": 6, "training__save_steps": 3},
    "again": {
        "training__max_steps": 6, "training__save_steps": 3, "output_dir": "pairs-again",
        "training__resume_from_checkpoint": "pairs-whole/checkpoint-3",
    },
}  # fmt: skip
# Labelled answers: 4 of them in each micro-step of all ranks; their mean is the baseline.
LABELED: dict[str, Any] = PAIRED | {
    "dataset__path": "answers.jsonl", "dataset__evaluation__path": "answers.jsonl", "preference__loss": "kto",
    "training__learning_rate": 3e-2,
}  # fmt: skip
KTO: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero__stage": stage} for stage in STAGES},
    "cached": {"preference__reference": "cached", "zero__stage": 3},
}

# Reward models: the same global batches, in packs of several sizes or apart.
SCORED: dict[str, Any] = PAIRED | {"task": "reward", "reward__center": 0.01, "training__learning_rate": 3e-3}
REWARDS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero__stage": stage} for stage in STAGES},
    "by-module": {"zero__stage": 3, "zero__gather": "module", "zero__persistence_threshold": 0},
}
OTHER_REWARDS: dict[str, dict[str, Any]] = {
    "packed-2": {"dataset__packing": True, "zero__stage": 2},
    "packed-3": {"dataset__packing": True, "zero__stage": 3, "training__gradient_checkpointing": "non_reentrant"},
    "nf4-2": {"adapter": "qlora", "zero__stage": 2},
    "nf4-3": {"adapter": "qlora", "zero__stage": 3, "ops__backend": "reference"},
    "whole": {"training__max_steps": 6, "training__save_steps": 3, "zero__stage": 3},
    "again": {
        "training__max_steps": 6, "training__save_steps": 3, "zero__stage": 3, "output_dir": "reward-again",
        "training__resume_from_checkpoint": "reward-whole/checkpoint-3",
    },
}  # fmt: skip

TWO_RANKS: list[dict[str, Any]] = [
    *_equal_losses(),
    *_resumes(),
    *(case(f"{name}-{stage}", zero__stage=stage, **changes) for name, changes in VARIANTS.items() for stage in (2, 3)),
    *(case(f"fp8-{stage}", zero__stage=stage, **VARIANTS["fp8"]) for stage in (0, 1)),
    *(
        case(f"rounded-{kind}-{stage}", zero__stage=stage, training__qat=kind)
        for kind, stages in (("int8", (2, 3)), ("int4", STAGES))
        for stage in stages
    ),
    *(case(f"rounded-{name}", training__qat="int4", **changes) for name, changes in ROUNDED.items()),
    # Siblings share one 8-bit gradient in our operator and not in PEFT's forward: other roundings.
    case("fp8-peft", zero__stage=3, zero__gather="module", **{**VARIANTS["fp8"], "ops__backend": "peft"}),
    # Weights that move, as saving insists, and losses that do not.
    case("untrained", zero__stage=2, training__learning_rate=1e-9),
    case("untrained-biased", zero__stage=2, training__learning_rate=1e-9, base_model="biased"),
    case("clipped-0", zero__stage=0, training__max_grad_norm=0.05),
    case("answers-2", zero__stage=2, logging__sample_prompts=["red cat", "blue dog"], logging__sample_tokens=6),
    case("answers-3", zero__stage=3, logging__sample_prompts=["red cat", "blue dog"], logging__sample_tokens=6),
    case(
        "answers-qlora-3",
        zero__stage=3,
        adapter="qlora",
        ops__backend="reference",
        logging__sample_prompts=["red cat"],
        logging__sample_tokens=6,
    ),
    *(case(f"pairs-{name}", **PAIRED, **changes) for name, changes in (PREFERENCES | OTHER_PREFERENCES).items()),
    *(case(f"kto-{name}", **LABELED, training__batch_size=2, **changes) for name, changes in KTO.items()),
    *(case(f"reward-{name}", **SCORED, **changes) for name, changes in (REWARDS | OTHER_REWARDS).items()),
    case("kto-nf4-2", **LABELED, training__batch_size=2, adapter="qlora", zero__stage=2),
    case("kto-nf4-3", **LABELED, training__batch_size=2, adapter="qlora", zero__stage=3, ops__backend="reference"),
    case("offload-2", zero__stage=2, zero__offload_optimizer=True),
    case("offload-3", zero__stage=3, zero__offload_optimizer=True, zero__offload_parameters=True),
    case("dropout", zero__stage=2, lora__dropout=0.3, training__gradient_checkpointing="non_reentrant"),
    case("never-evaluated", zero__stage=2, lora__dropout=0.3, dataset__evaluation=None),
    case("separate-tensors", zero__stage=2, ops__flat=False),
    case("pissa-2", zero__stage=2, lora__init="pissa"),
    # Cut at step 3 on two ranks; one rank and another stage resume below.
    case("cut", zero__stage=2, training__max_steps=6, training__save_steps=3),
    case("cut-adam8", zero__stage=2, training__max_steps=6, training__save_steps=3, **ADAM8),
    case(
        "cut-to-stage3",
        zero__stage=3,
        training__max_steps=6,
        training__resume_from_checkpoint="cut/checkpoint-3",
        output_dir="cut-to-stage3",
    ),
]

# Decay by more than there is, of steps of 10,000: weights grow until the fifth step is not finite.
DIVERGES = {
    "training__learning_rate": 1.0,
    "training__weight_decay": 10.0,
    "lora__loraplus_lr_ratio": 1e4,
    "lora__alpha": 1e6,
}
ONE_RANK: list[dict[str, Any]] = [
    # The same global batch of 8 as 2 ranks x 2 micro-steps x 2.
    case("one-4x2", zero__stage=0, training__gradient_accumulation_steps=4),
    case("one-1x8", zero__stage=0, training__gradient_accumulation_steps=1, training__batch_size=8),
    case("one-qlora", zero__stage=2, adapter="qlora", training__gradient_accumulation_steps=4),
    case(
        "cut-to-one-rank",
        zero__stage=2,
        training__gradient_accumulation_steps=4,
        training__max_steps=6,
        training__resume_from_checkpoint="cut/checkpoint-3",
        output_dir="cut-to-one-rank",
    ),
    case(
        "cut-adam8-to-one-rank",
        zero__stage=0,
        training__gradient_accumulation_steps=4,
        training__max_steps=6,
        training__resume_from_checkpoint="cut-adam8/checkpoint-3",
        output_dir="cut-adam8-to-one-rank",
        **ADAM8,
    ),
    case(
        "longer",
        zero__stage=2,
        training__gradient_accumulation_steps=4,
        training__max_steps=8,
        training__resume_from_checkpoint="cut/checkpoint-6",
        output_dir="longer",
    ),
    # Learning rates at which the held-out loss soon rises.
    case(
        "early", training__learning_rate=0.3, training__max_steps=8, training__eval_steps=1, training__early_stopping=2
    ),
    case(
        "best",
        training__learning_rate=0.2,
        training__lr_scheduler="constant_with_warmup",
        training__warmup_steps=3,
        training__max_steps=5,
        training__eval_steps=1,
        training__best_checkpoint=True,
        training__save_total_limit=1,
    ),
    case("nonfinite-stop-0", zero__stage=0, training__max_steps=8, **DIVERGES),
    case("nonfinite-stop-2", zero__stage=2, training__max_steps=8, **DIVERGES),
    case("nonfinite-skip-2", training__max_steps=20, training__on_nonfinite="skip", **DIVERGES),
    case("pairs-one-rank", **PAIRED, training__gradient_accumulation_steps=4),
    case("kto-one-rank", **LABELED, training__batch_size=4),
    case("reward-one-rank", **SCORED, training__gradient_accumulation_steps=4),
    case("pairs-streamed", **PAIRED, dataset__shuffle=False, dataset__streaming=True),
    case("pairs-in-order", **PAIRED, dataset__shuffle=False),
    case("in-order", dataset__shuffle=False),
    case("streamed", dataset__shuffle=False, dataset__streaming=True),
    case("grown-vocabulary", model__added_tokens=",".join(f"<extra-{index}>" for index in range(80))),
    case("added-tokens", model__added_tokens="<note>,<end-note>"),
    case("two-epochs", training__max_steps=None, training__epochs=2, training__gradient_accumulation_steps=3),
]
