"""Clip gradients and skip non-finite steps inside the optimizer's own update, without a wait of the host.

DeepSpeed's checks wait for the device three times per step and are switched off. torch's fused AdamW reads the
attributes `grad_scale` and `found_inf`, and a method of DeepSpeed that measures the norm is replaced. If one of these
names changed, steps would silently be unclipped or NaN. Therefore the update is tried on a scratch tensor before
training, and no group is updated before its norm was measured here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.known_versions import changed, replaces, require
from trainer.parallel.engine.protocol import Engine
from trainer.patches.replace import replace

NORM_METHOD = "get_grad_norm_direct"
TRIED_WEIGHT, TRIED_GRADIENT, TRIED_SCALE, TRIED_RATE = 0.5, 3.0, 4.0, 0.25
TRIED_ERROR = 1e-2
"""Relative. On a GPU 1 - beta2 is rounded to fp32, by 5e-5 for 0.999; without the scale the error is a factor of 4."""


@replaces("`get_grad_norm_direct`")
@replaces("`grad_scale` and `found_inf` of torch's fused AdamW")
class UpdateGuard:
    """Gives the optimizer of an engine of stage 1 or 2 the gradient norm before every update of a group."""

    def __init__(self, engine: Engine, max_grad_norm: float) -> None:
        """Install the guard. Raises UserError if torch or DeepSpeed no longer works as expected."""
        self._zero, self._max_grad_norm = engine.optimizer, max_grad_norm
        require_fused_update(engine.basic_optimizer, engine.device)
        for name in (NORM_METHOD, "_global_grad_norm"):
            require(self._zero, name, "deepspeed")
        self._groups = len(engine.basic_optimizer.param_groups)
        self._measured: list[Tensor] = []
        self._norm: Tensor | None = None
        self._updated = 0
        replace(self._zero, NORM_METHOD, self._measure)
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def _measure(self, gradients: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        """Replace DeepSpeed's norm (0.19.8), which turns non-finite values into -1 and waits for the device twice."""
        if len(self._measured) == self._groups:
            raise changed("deepspeed", "the optimizer did not update the groups that were measured for the last step")
        norm = gradient_norm(self._zero, gradients)
        self._measured.append(norm)
        return norm

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed measures all groups, then updates them one by one.
        if self._updated == 0:
            if len(self._measured) != self._groups:
                raise changed("deepspeed", f"{len(self._measured)} of {self._groups} norms came from `{NORM_METHOD}`")
            self._norm = torch.stack(self._measured).square().sum().sqrt()
            self._zero._global_grad_norm = self._norm  # the engine reports this
            _give(optimizer, self._norm, self._max_grad_norm)
        self._updated += 1
        if self._updated == self._groups:
            self._measured, self._updated = [], 0


@replaces("`get_grad_norm_direct`")
class AdapterGuard:
    """Clips each adapter's gradient by its own norm, and updates only the adapters with a finite one."""

    def __init__(self, engine: Engine, limits: Sequence[float]) -> None:
        """Install the guard on an engine of stage 1 or 2 with a group for each adapter; a limit of 0 does not clip."""
        self._engine, self._zero, self._limits = engine, engine.optimizer, limits
        self._updated = 0
        self.waiting: set[int] = set()
        """Adapters that are not trained at present."""
        self.norms: list[Tensor] = []
        """Norm of each adapter's gradient in the last step, before clipping."""
        require(self._zero, NORM_METHOD, "deepspeed")
        # DeepSpeed would skip all adapters for the gradient of one; it clips nothing, as its limit is 0.
        replace(self._zero, NORM_METHOD, lambda *_, **__: torch.zeros((), device=engine.device))
        engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def check(self) -> None:
        """Raise UserError unless DeepSpeed has just updated every adapter once, through this guard."""
        if self._updated != len(self._limits):
            raise changed("deepspeed", f"{self._updated} of {len(self._limits)} groups were updated one by one")
        self._updated = 0

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        # DeepSpeed gives the optimizer one group at a time.
        if self._updated == 0:
            self.norms = []
        [group], own = optimizer.param_groups, self._updated
        parameters = [each for each in group["params"] if each.grad is not None]
        norm = gradient_norm(self._zero, [each.grad for each in parameters])
        self.norms.append(norm)
        self._updated += 1
        limit = self._limits[own]
        if own in self.waiting:
            for parameter in parameters:
                parameter.grad = None
        elif optimizer.defaults.get("fused") and self._engine.device.type == "cuda":
            _give(optimizer, norm, limit)
        elif not torch.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
        elif limit:
            for parameter in parameters:
                parameter.grad.div_(((norm + 1e-6) / limit).clamp(min=1.0))


def _give(optimizer: Any, norm: Tensor, max_grad_norm: float) -> None:
    """Set the attributes of torch's fused optimizers: gradients are divided by `grad_scale`, `found_inf` skips."""
    optimizer.grad_scale = (norm / max_grad_norm).clamp(min=1.0).float() if max_grad_norm else None
    optimizer.found_inf = (~torch.isfinite(norm)).float()


def gradient_norm(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all ranks of a group's gradients, non-finite if one of them is.

    `optimizer` is DeepSpeed's of stage 1 or 2. A rank's shard of a group may contain padding, which is zeros.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    squared = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
    dist.all_reduce(squared, group=require(optimizer, "dp_process_group", "deepspeed"))
    return squared.sqrt()


def require_fused_update(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise UserError unless the optimizer divides by `grad_scale` and skips an update on `found_inf`."""
    group = optimizer.param_groups[0]
    weight = torch.nn.Parameter(torch.full((3,), TRIED_WEIGHT, device=device))
    kind: Any = type(optimizer)
    twin = kind([{**group, "lr": TRIED_RATE, "params": [weight]}])
    weight.grad = torch.full_like(weight, TRIED_GRADIENT)
    _give(twin, torch.tensor(TRIED_SCALE, device=device), 1.0)
    twin.step()
    # The first step of AdamW (Loshchilov and Hutter, 2019) from zero moments with the clipped gradient.
    clipped = TRIED_GRADIENT / TRIED_SCALE
    beta1, beta2 = group["betas"]
    expected = {
        "weight": TRIED_WEIGHT * (1 - TRIED_RATE * group["weight_decay"])
        - TRIED_RATE * clipped / (clipped + group["eps"]),
        "exp_avg": (1 - beta1) * clipped,
        "exp_avg_sq": (1 - beta2) * clipped**2,
        "step": 1.0,
    }
    if not _equal(_numbers(twin, weight), expected):
        raise changed("torch", f"{kind.__name__}(fused=True) does not divide gradients by `grad_scale`")
    weight.grad = torch.full_like(weight, torch.nan)
    _give(twin, torch.tensor(torch.nan, device=device), 1.0)
    twin.step()
    if not _equal(_numbers(twin, weight), expected):
        raise changed("torch", f"{kind.__name__}(fused=True) does not skip an update for `found_inf`")


def _numbers(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    return {"weight": weight.detach()} | {name: value for name, value in optimizer.state[weight].items()}


def _equal(found: dict[str, Tensor], expected: dict[str, float]) -> bool:
    return all(
        name in found and bool(((found[name] - value).abs() <= TRIED_ERROR * abs(value)).all())
        for name, value in expected.items()
    )
