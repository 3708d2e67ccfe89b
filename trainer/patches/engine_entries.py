"""What is replaced in libraries once the model is built: DeepSpeed's engine, the optimizer, single passes."""

from trainer.patches.entry import Patch

WITH_ENGINE = "with the engine, whose own attribute it is"

AFTER_THE_MODEL = (
    Patch(
        "the configuration of DeepSpeed where it says nothing",
        "deepspeed",
        "0.19.8",
        "left alone it clips at 1.0, lowers the loss scale at the second overflow but for stage 0, and times steps",
        "every run",
        "trainer/engine/deepspeed_engine.py: deepspeed_config",
        "nothing is replaced: keys are written out",
        "tests/unit/test_workarounds.py: test_deepspeed_clips_if_nothing_is_said, test_stage_0_knows_no_hysteresis",
    ),
    Patch(
        "state and masters of the 16-bit optimizer of stage 0 after its start",
        "deepspeed",
        "0.19.8",
        "it makes the state by an update with gradients of zero, which decays the weights and counts as a step: the "
        "first update would be 0.74 of what is due",
        "zero.stage: 0 in bf16 or fp16",
        "trainer/engine/deepspeed_workarounds.py: undo_the_step_of_zeros",
        "once, at the start",
        "tests/unit/test_workarounds.py: test_stage_0_takes_a_step_of_zeros",
    ),
    Patch(
        "optimizer.step and _update_scale",
        "deepspeed",
        "0.19.8",
        "the loss scale is doubled before gradients are divided by it: the step in which it rises is half a step; at "
        "stage 0 the norm is reported times the scale",
        "fp16",
        "trainer/engine/deepspeed_workarounds.py: raise_the_loss_scale_last",
        WITH_ENGINE,
        "tests/unit/test_workarounds.py: test_the_loss_scale_rises_before_gradients_are_divided_by_it, "
        "test_stage_0_reports_the_norm_times_the_loss_scale; tests/unit/test_loss_scale.py",
        (
            "trainer/engine/deepspeed_workarounds.py: _global_grad_norm",
            "trainer/engine/deepspeed_workarounds.py: _update_scale",
            "trainer/engine/deepspeed_workarounds.py: step",
        ),
    ),
    Patch(
        "engine.backward",
        "deepspeed",
        "0.19.8",
        "stage 0 divides gradients by a loss scale with which it never multiplied the loss",
        "zero.stage: 0 in fp16; seen in the first gradient, and left out where DeepSpeed does multiply",
        "trainer/engine/deepspeed_workarounds.py: scale_the_loss",
        WITH_ENGINE,
        "tests/unit/test_workarounds.py: test_stage_0_divides_by_a_loss_scale_that_it_never_applied",
        ("trainer/engine/deepspeed_workarounds.py: backward",),
    ),
    Patch(
        "get_grad_norm_direct",
        "deepspeed",
        "0.19.8",
        "it waits twice for the device and writes -1 over what is not finite, which would pass as a norm",
        "bf16 on a GPU at stages 1 and 2 with AdamW in 32 bits",
        "trainer/engine/update_guard.py: UpdateGuard",
        WITH_ENGINE,
        "tests/unit/test_workarounds.py: test_deepspeeds_norm_hides_what_is_not_finite; "
        "tests/unit/test_update_guard.py",
        (
            "trainer/engine/update_guard.py: _global_grad_norm",
            "trainer/engine/update_guard.py: register_step_pre_hook",
            "trainer/engine/update_guard.py: setattr",
        ),
    ),
    Patch(
        "grad_scale and found_inf of torch's fused AdamW",
        "torch",
        "2.13.0",
        "the optimizer divides and skips by itself, and the host waits for nothing; tried on a scratch tensor first",
        "bf16 on a GPU at stages 1 and 2 with AdamW in 32 bits",
        "trainer/engine/update_guard.py: UpdateGuard",
        "with the optimizer",
        "tests/unit/test_update_guard.py",
        ("trainer/engine/update_guard.py: found_inf", "trainer/engine/update_guard.py: grad_scale"),
    ),
    Patch(
        "forward of what lies below the head of an empty model",
        "transformers",
        "5.23.0",
        "what follows the head is run alone, to see whether logits are more than a multiple of what it gives",
        "deciding, before weights are loaded",
        "trainer/patches/model_facts.py: why_head_apart",
        "at the end of the same function",
        "tests/unit/test_decisions.py",
        ("trainer/patches/model_facts.py: forward",),
    ),
    Patch(
        "forward of the output head",
        "transformers",
        "5.23.0",
        "head and loss in chunks: the logits of a micro-batch are never there as a whole",
        "a frozen, whole head outside of fp16 whose logits are at most multiplied; one forward pass at a time",
        "trainer/patches/loss_head.py: _head_replaced",
        "at the end of the pass",
        "tests/unit/test_head.py",
        ("trainer/patches/loss_head.py: forward",),
    ),
    Patch(
        "the reduction of gradients, and its state after a pass that was given up",
        "deepspeed",
        "0.19.8",
        "no rank may change a weight before all have said that none ran out of memory; hooks of stage 1 that were "
        "interrupted leave buffers and a depth behind",
        "training.on_oom: halve at stages 0 and 1",
        "trainer/memory/oom_recovery.py: Recovery",
        "in the same step",
        "tests/distributed/test_oom.py",
        ("trainer/memory/oom_recovery.py: _backward_active_depth",),
    ),
    Patch(
        "engine.backward and engine.step, within named ranges",
        "deepspeed",
        "0.19.8",
        "a trace then shows which kernels belong to the backward pass and to the update",
        "logging.profile_steps, in the steps that are recorded",
        "trainer/monitor/profiler.py: StepProfiler",
        "when the trace is written",
        "tests/unit/test_profiling.py",
        ("trainer/monitor/profiler.py: setattr",),
    ),
)
