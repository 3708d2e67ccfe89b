"""The operators of DeepSpeed and of this project in one table."""

import importlib.util

from deepspeed.ops.op_builder import builder as deepspeed_builder

from ops.builder import register

# Packages that are no operators of DeepSpeed's or ours, in the extra `mamba`.
MAMBA = ("mamba-ssm", "causal-conv1d")


def report() -> str:
    """Every operator in aligned columns: name, installed, compatible."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    ours = register()
    rows = [("operator", "installed", "compatible")]
    for name, builder in sorted(ALL_OPS.items()):
        installed = ours.installed() if name == ours.NAME else bool(installed_ops.get(name, False))
        compatible = deepspeed_builder.probe_is_compatible(builder, verbose=False)
        rows.append((name, "yes" if installed else "no", "yes" if compatible else "no"))
    lines = [f"{name:<28}{installed:<12}{compatible}" for name, installed, compatible in rows]
    for name in MAMBA:
        found = importlib.util.find_spec(name.replace("-", "_")) is not None
        lines.append(f"{name:<28}{'yes' if found else 'no':<12}of others, for Mamba layers")
    if not ours.is_compatible():
        lines.append(f"{ours.NAME}: {ours.error_log}")
    return "\n".join(lines)
