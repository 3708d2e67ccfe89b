"""Work around PEFT's translation of the layer names that MoE models had in transformers 4 (peft#3711).

In transformers 5 experts are parameters instead of modules. PEFT translates the targets gate_proj, up_proj and
down_proj (w1, w2, w3) to `target_parameters`, and drops dense layers and shared experts with these names. It also
applies the renamings of the model's checkpoint to the tensors of a loaded adapter.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.config import UserError
from trainer.contract.known_versions import patch_attribute, replaces, require


@replaces("the conversion of target names")
def keep_target_names() -> AbstractContextManager[None]:
    """Disable PEFT's translation of target names within the context."""
    import peft.utils.transformers_weight_conversion as conversion

    return patch_attribute(conversion, "convert_peft_config_for_transformers", lambda *args, **kwargs: None, "peft")


def find_expert_like_names(model: Any, names: set[str]) -> set[str]:
    """Return the names of linear layers that PEFT would mistake for parts of experts when it loads an adapter."""
    import peft.utils.transformers_weight_conversion as conversion
    from peft import LoraConfig

    translate = require(conversion, "convert_peft_config_for_transformers", "peft")
    rejected = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            translate(config, model, None)
        except ValueError:  # PEFT fuses two targets into one, but the other one is missing
            rejected.add(name)
            continue
        if name not in set(config.target_modules or ()):
            rejected.add(name)
    return rejected


def find_rejected_names(model: Any, names: set[str]) -> dict[str, str]:
    """Return the layer names that PEFT refuses to adapt, as in some Mamba models, with the reason."""
    import peft.tuners.tuners_utils as tuners
    from peft import LoraConfig

    check, config, rejected = require(tuners, "_check_lora_target_modules_mamba", "peft"), LoraConfig(), {}
    for name in names:
        try:
            check(config, model, name)
        except ValueError:
            kind = model.config.model_type
            rejected[name] = f"PEFT does not adapt them in {kind} models, where kernels read the weight directly"
    return rejected


def map_loaded_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Map tensor names in an adapter's file to the names under which PEFT looks for them in the model.

    Omits tensors that PEFT would combine. The model may be on the meta device and need not have an adapter.
    """
    import peft.utils.transformers_weight_conversion as conversion
    from peft import LoraConfig

    translate = require(conversion, "convert_peft_adapter_state_dict_for_transformers", "peft")
    file_names = list(names)
    numbers = {name: torch.tensor([number], device="cpu") for number, name in enumerate(file_names)}
    translated = translate(model, LoraConfig(), numbers).items()
    return {file_names[int(number)]: name for name, number in translated if number.numel() == 1}


def map_saved_names(adapted: Any, names: Iterable[str]) -> dict[str, str]:
    """Map an adapter's tensor names in the model to names that plain PEFT can load.

    Most names stay the same. The checkpoint's name is used if PEFT would rename the model's name again, as for
    `shared_expert.` in Laguna. Raises UserError if PEFT could load neither name.
    """
    from transformers import core_model_loading

    model_names = list(names)
    loaded_names = map_loaded_names(adapted, model_names)
    unloaded = [name for name in model_names if loaded_names.get(name) != name]
    if not unloaded:
        return dict(zip(model_names, model_names, strict=True))
    revert = require(core_model_loading, "revert_weight_conversion", "transformers")
    base, prefix = adapted.get_base_model(), "base_model.model."
    tensors = {name.removeprefix(prefix): torch.empty(0, device="cpu") for name in unloaded}
    checkpoint_candidates = [prefix + name for name in revert(base, tensors)]
    checkpoint_names = {name: older for older, name in map_loaded_names(adapted, checkpoint_candidates).items()}
    missing = [name for name in unloaded if name not in checkpoint_names]
    if missing:
        raise UserError(
            f"lora.target_modules: PEFT could not reload {len(missing)} of {len(model_names)} tensors of this adapter "
            f"(first: {missing[0]}); exclude their layers with lora.exclude_modules"
        )
    return {name: checkpoint_names.get(name, name) for name in model_names}
