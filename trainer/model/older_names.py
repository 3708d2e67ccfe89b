"""PEFT's translation of the names that layers of mixtures had in older models, which mistakes some (peft#3711).

transformers 5 holds experts as parameters where each was a module before. PEFT translates gate_proj, up_proj and
down_proj (w1, w2, w3) into `target_parameters` of these, and drops the dense layers and shared experts of that name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.contract.known_versions import require


@contextmanager
def names_as_they_are() -> Iterator[None]:
    """While PEFT puts an adapter on a model: without the translation."""
    import peft.utils.transformers_weight_conversion as conversion

    translate = require(conversion, "convert_peft_config_for_transformers", "peft")
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = translate


def taken_for_experts(model: Any, names: set[str]) -> set[str]:
    """Those of these names of linear layers that PEFT, when it loads an adapter, would take for experts' parts."""
    import peft.utils.transformers_weight_conversion as conversion
    from peft import LoraConfig

    translate = require(conversion, "convert_peft_config_for_transformers", "peft")
    taken = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            translate(config, model, None)
        except ValueError:  # one of two names that it fuses into one
            taken.add(name)
            continue
        if name not in set(config.target_modules or ()):
            taken.add(name)
    return taken
