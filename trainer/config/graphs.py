"""Which settings leave micro-steps that CUDA graphs cannot play back."""

from trainer.config.sections import RunConfig


def why_no_graphs(config: RunConfig) -> str | None:
    """The setting that is in the way, and why; None if there is none."""
    training = config.training
    if config.adapter == "none":
        return "adapter: none trains all weights, and a recording has one adapter in one buffer"
    if not config.ops.flat:
        return "ops.flat: false gives every factor a gradient of its own"
    if config.zero.stage == 3:
        return "zero.stage: 3 gathers weights within a pass"
    if training.torch_compile:
        return "training.torch_compile has graphs of its own"
    if training.gradient_checkpointing == "reentrant":
        return "reentrant checkpointing runs a backward pass of its own for every layer"
    if training.offload_activations:
        return "training.offload_activations copies beside the pass"
    if training.router_aux_loss:
        return "training.router_aux_loss is a second result of the pass"
    if training.qat:
        return "training.qat draws dropout on the host"
    return None
