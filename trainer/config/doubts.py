"""Settings that can be meant but seldom are: said before training, which goes on."""

from trainer.config.sections import RunConfig

HIGHEST_USUAL_RATE = 1e-2
LARGEST_USUAL_SCALE = 32.0


def doubts(config: RunConfig) -> list[str]:
    """A line for each setting far from what adapters are trained with."""
    training, lora = config.training, config.lora
    lines = []
    if training.learning_rate > HIGHEST_USUAL_RATE:
        lines.append(
            f"training.learning_rate={training.learning_rate:g}: far above what AdamW trains with (1e-5 to 1e-3); "
            "expect the loss to rise"
        )
    if config.adapter != "none" and lora.adapter_path is None:
        scale = lora.alpha / (lora.r**0.5 if lora.rslora else lora.r)
        if scale > LARGEST_USUAL_SCALE:
            lines.append(
                f"lora.alpha={lora.alpha:g}: scales the update by {scale:g} at lora.r={lora.r}; 1 or 2 are usual, so "
                "expect the loss to rise"
            )
    if training.torch_compile and config.adapter != "none" and config.ops.backend != "peft":
        lines.append(
            "training.torch_compile=true: turns off what is computed together here (siblings, one buffer for the "
            "adapter, norms, SwiGLU, rotary embedding), which was slower and took more memory where it was measured "
            "(docs/lab/performance.md); leave it out, or measure: `zerolora bench training.torch_compile=true`"
        )
    if training.adam_epsilon > 1e-3:
        lines.append(
            f"training.adam_epsilon={training.adam_epsilon:g}: larger than most gradients; 1e-8 is usual, and "
            "hardly anything will be learnt"
        )
    return lines
