"""`lora.r` held against the widths of the layers that it adapts."""

from torch import nn

from trainer.config import LoraSection, UserError


def check_rank(model: nn.Module, lora: LoraSection) -> list[str]:
    """A note on layers narrower than the rank. Raises UserError if all of them are; the model may be without weights.

    An update s B A of a layer of I inputs and O outputs has a rank of min(I, O) at most: more only costs memory.
    """
    if lora.adapter_path:
        return []
    widths = _widths(model, lora)
    if not widths or lora.r <= min(widths.values()):
        return []
    narrowest, widest = min(widths.values()), max(widths.values())
    if lora.r > widest:
        raise UserError(
            f"lora.r={lora.r}: no adapted layer of this model is wider than {widest}, and a higher rank adds nothing; "
            f"use {widest} or less (8 to 64 are usual)"
        )
    names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name, width in widths.items() if width < lora.r}))
    return [f"lora.r={lora.r}: is more than the width of {names} ({narrowest}), to which a higher rank adds nothing"]


def _widths(model: nn.Module, lora: LoraSection) -> dict[str, int]:
    """The smaller dimension of each layer that gets an adapter."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    widths: dict[str, int] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if not is_matrix or weight is None or weight.dim() != 2 or module is head or _named(name, lora.exclude_modules):
            continue
        if lora.target_modules == ("all-linear",) or _named(name, lora.target_modules):
            widths[name] = min(weight.shape)
    return widths


def _named(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)
