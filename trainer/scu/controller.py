"""Connect the Shannon Control Unit to the training loop: penalty, measurement, lambda updates and records.

Optimizer step t:

    last micro-step:  forward; penalty(t) first updates lambda by S (or K) of step t-1; backward of loss + penalty
    reduction:        the loop sums (loss, tokens, get_local_contribution()) over the ranks in the loss's all-reduce
    observe(t, ...):  starts an asynchronous copy of the three sums to the host; step t steers step t+1

The host synchronizes with the device only every `scu.check_every` steps, to check that lambda is bitwise equal on all
ranks. Evaluation does not use the penalty. Faults raise ScuError on every rank; training never continues uncontrolled.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import ScuSection, UserError
from trainer.contract.whole_files import write_json
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.scu import law as scu
from trainer.scu.divergence import Divergence
from trainer.scu.information import AdapterInformation, compute_data_bpt
from trainer.scu.law_settings import adapt_state, build_adapter_information, build_law

MIB = 2**20
MEMORIZED_BPT = 1e-3
"""DataBPT of memorized text; runs that overfit reach 0.002 (docs/lab/scu.md)."""


class ScuError(RuntimeError):
    """Raised if a measurement is not finite, or if lambda differs between ranks."""


@dataclass(frozen=True)
class _PendingMeasurement:
    """A measurement that is being copied to the host.

    `sums` in fp64: loss sum (nats), target tokens, Q or the sum of KL (nats), and whether the step was applied.
    """

    step: int
    sums: Tensor
    copied: torch.cuda.Event | None
    memory_mb: float

    def wait(self) -> list[float]:
        """Return the sums as numbers; this rarely blocks, since the copy was started one step earlier."""
        if self.copied is not None:
            self.copied.synchronize()
        return [float(number) for number in self.sums.tolist()]


class ScuController:
    """Computes the penalty and adjusts lambda during a run (the Shannon Control Unit).

    `target_tokens` is N, the number of target tokens per epoch (`scu.tokens` overrides it), and `total_steps` the
    number of planned optimizer steps. `scu.target: auto` depends on `base_parameters`, the size of the base model.
    `divergence` measures K for `scu.measure: kl`. Raises UserError for invalid settings.
    """

    def __init__(
        self,
        section: ScuSection,
        model: nn.Module,
        *,
        target_tokens: int | None,
        total_steps: int,
        base_parameters: int,
        divergence: Divergence | None = None,
    ) -> None:
        assert (section.measure == "kl") == (divergence is not None), f"scu.measure={section.measure}, {divergence}"
        self.section, self.divergence = section, divergence
        self.tokens = section.tokens or target_tokens
        self.information: AdapterInformation | None = None
        if divergence is None:
            self.information = build_adapter_information(section, model, self.tokens)
        self.law = build_law(section, total_steps=total_steps, base_parameters=base_parameters)
        self.state = scu.build_initial_state(self.law)
        self.records: list[dict[str, Any]] = []
        self.fitted: dict[str, float] | None = None
        """Result of `scu.scale_to_target`, set after training; None if no reference text was held out."""
        self._pending: _PendingMeasurement | None = None
        self._measured: Tensor | None = None

    @property
    def lambda_(self) -> float:
        return self.state.lambda_

    def check_target(
        self,
        current_data_bpt: float,
        planned_learning_rates: Iterable[float],
        *,
        b_ratio: float = 1.0,
        resumes: bool = False,
    ) -> list[str]:
        """Check before the first step that S can reach the target; return warnings. A collective call.

        Raises UserError with the reachable range if it cannot; a run that `resumes` may have few steps left, so it only
        gets a warning.

        `current_data_bpt`: bits per target token of the current model, equal on all ranks. `planned_learning_rates`:
        A's rate in each remaining step; `b_ratio`: B's rate divided by A's (LoRA+). In a step AdamW moves an element by
        at most about the learning rate. S also rises as DataBPT falls, so the upper bound assumes memorized data.
        """
        if self.law.controller != "pi" or self.information is None:
            return []
        reach = math.fsum(planned_learning_rates)
        squares = self.information.compute_reachable_bounds(reach, reach * b_ratio)
        bits_low, bits_high = (self.information.compute_bits(bound) for bound in squares)
        low = scu.compute_s_ratio(current_data_bpt, bits_low)
        now_global = sum_over_ranks(self._divide_by_ranks(self.information.compute_sum_of_squares().detach()))
        now = scu.compute_s_ratio(current_data_bpt, self.information.compute_bits(now_global.item()))
        target = self.law.target
        high = scu.compute_s_ratio(MEMORIZED_BPT, bits_high)
        warnings = [warning] if (warning := scu.build_gain_warning(self.law)) else []
        if not low <= target <= high:
            problem = (
                f"scu.target={target:g}: out of reach; S is {now:.3g} now, and these learning rates keep it within "
                f"[{low:.3g}, {high:.3g}]; set a target in this range, or change scu.sigma={self.section.sigma:g}"
            )
            if not resumes:
                raise UserError(problem)
            warnings.append(problem)
        if now > target + self.law.deadband and self.section.measure == "factors":
            problem = f"S starts at {now:.3g}, mostly from the random initialization of A"
            warnings.append(f"scu.target={target:g}: {problem}; with scu.measure: delta it starts at 0")
        return warnings

    def compute_penalty(self, step: int) -> Tensor:
        """Return the differentiable penalty for a step (from 1) in nats per token: lambda ln 2 ParamBPT, or lambda K.

        A collective call, once per step, between the last micro-step's forward and backward pass. The step's penalty is
        the mean over ranks, which the engine computes by averaging gradients.
        """
        self.apply_pending_measurement()
        if self.divergence is not None:
            penalty = self.divergence.compute_penalty(step, self.lambda_)
            self._measured = self.divergence.local_sum
            return penalty
        assert self.information is not None
        squares = self.information.compute_sum_of_squares()
        self._measured = squares.detach()
        if self.law.controller == "none":
            return torch.zeros_like(self._measured)
        return squares * (self.lambda_ * self.information.nats_per_square)

    def get_local_contribution(self) -> Tensor:
        """Return this rank's contribution to Q or the KL sum, in fp64 on the device, to be summed over ranks."""
        if self._measured is None:
            raise ScuError("scu: get_local_contribution() was called before penalty() in this step")
        return self._measured if self.divergence is not None else self._divide_by_ranks(self._measured)

    def observe(
        self,
        step: int,
        loss_sum_global: Tensor,
        target_tokens_global: Tensor | int,
        measured_global: Tensor,
        applied: Tensor | bool = True,
    ) -> None:
        """Record the sums of step `step` over all ranks and micro-steps without synchronizing with the device.

        A collective call. A step that was not `applied` does not change the controller.
        """
        if step % self.section.check_every == 0:
            self._check_ranks_agree(step)
        if step % self.section.every:
            return  # no control step
        measured = measured_global.detach().double()
        device = measured.device
        # Create the numbers on the device: copying them from the host would synchronize.
        tokens, was_applied = (
            value.to(device, torch.float64) if isinstance(value, Tensor) else measured.new_full((), float(value))
            for value in (target_tokens_global, applied)
        )
        sums = torch.stack([loss_sum_global.detach().to(device, torch.float64), tokens, measured, was_applied])
        copied, memory_mb = None, 0.0
        if device.type == "cuda":
            sums = torch.empty(4, dtype=torch.float64, pin_memory=True).copy_(sums, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            memory_mb = torch.cuda.memory_allocated(device) / MIB
        self._pending = _PendingMeasurement(step, sums, copied, memory_mb)

    def apply_pending_measurement(self) -> None:
        """Update lambda from the pending measurement. Called by `compute_penalty`; may be called earlier."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        loss_sum, tokens, measured, was_applied = pending.wait()
        if not was_applied or tokens == 0:
            return  # a skipped step, or one without target tokens
        if not math.isfinite(loss_sum) or not math.isfinite(measured) or loss_sum < 0:
            measure = "adapter" if self.divergence is None else "divergence from the base model"
            raise ScuError(
                f"scu: step {pending.step} has a loss sum of {loss_sum} nats over {tokens:g} target tokens, and "
                f"measured {measured} for the {measure}; check the loss of that step, or lower training.learning_rate"
            )
        lambda_, data = self.lambda_, compute_data_bpt(loss_sum, tokens)
        if self.divergence is not None:
            bits = self.divergence.compute_bits(pending.step, measured)
            self.state = scu.advance(self.law, self.state, bits)
            measures = {"kl_bits": bits, "kl_smoothed": self.state.smoothed}
        else:
            assert self.information is not None
            bits = self.information.compute_bits(measured)
            self.state = scu.advance(self.law, self.state, scu.compute_s_ratio(data, bits))
            measures = {"param_bpt": bits, "s_ratio": self.state.measured, "s_smoothed": self.state.smoothed}
        ce_loss, reg_loss = loss_sum / tokens, lambda_ * math.log(2.0) * bits
        self.records.append(
            {
                "step": pending.step,
                "ce_loss": ce_loss,
                "reg_loss": reg_loss,
                "total_loss": ce_loss + reg_loss,
                "data_bpt": data,
                **measures,
                "lambda": lambda_,
                "integral_term": self.state.integral,
                "error": self.state.error,
                "cuda_memory_mb": pending.memory_mb,
            }
        )

    def get_metrics(self) -> dict[str, float]:
        """Return the `scu/*` metrics of the last applied measurement, not of a pending one."""
        values = {"scu/lambda": self.lambda_}
        if self.law.controller == "pi":
            values["scu/target"] = self.law.target
        if self.records:
            last = self.records[-1]
            names = ("s_ratio", "s_smoothed", "param_bpt", "kl_bits", "kl_smoothed", "data_bpt", "error")
            values |= {f"scu/{name}": last[name] for name in names if name in last}
            if self.law.form == "published":
                values["scu/integral"] = last["integral_term"]
        return values

    def state_dict(self) -> dict[str, Any]:
        pending = self._pending and {
            "step": self._pending.step,
            "sums": self._pending.wait(),
            "memory_mb": self._pending.memory_mb,
        }
        return {"controller": asdict(self.state), "pending": pending}

    def load_state_dict(self, values: dict[str, Any], *, step: int, run_dir: Path | None = None) -> list[str]:
        """Resume after optimizer step `step`, with the records in `run_dir`; return notes on changed settings."""
        self.state, notes = adapt_state(self.law, scu.ControllerState(**values["controller"]))
        pending = values["pending"]
        self._pending = pending and _PendingMeasurement(
            pending["step"], torch.tensor(pending["sums"], dtype=torch.float64), None, pending["memory_mb"]
        )
        settled_until = self._pending.step - 1 if self._pending else step
        path = run_dir / "scu_metrics.json" if run_dir else None
        if path is not None and path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            self.records = [record for record in written if record["step"] <= settled_until]
        return notes

    def write_files(self, run_dir: Path) -> None:
        """Write scu_config.json, scu_metrics.json and scu_history.json (on rank 0, while no measurement is pending)."""
        config = self.section.model_dump(mode="json") | {"target": self.law.target, "tokens": self.tokens}
        config["total_updates"] = self.law.total_updates
        if self.fitted is not None:
            config["fitted"] = self.fitted
        if self.law.form == "published":
            config["gain_bound"] = scu.compute_gain_bound(self.law.target)
        on_gpu = torch.cuda.is_available()
        measured = "s_ratio" if self.divergence is None else "kl_bits"
        history = {
            f"{measured}_history": [record[measured] for record in self.records],
            "lambda_history": [record["lambda"] for record in self.records],
            f"target_{measured}": self.law.target,
            "peak_cuda_memory_mb": torch.cuda.max_memory_allocated() / MIB if on_gpu else 0.0,
            "cuda_memory_stats": dict(torch.cuda.memory_stats()) if on_gpu else {},
        }
        for name, content in (("config", config), ("metrics", self.records), ("history", history)):
            write_json(run_dir / f"scu_{name}.json", content)

    def _divide_by_ranks(self, squares: Tensor) -> Tensor:
        """Divide this rank's Q by the number of ranks, so that the sum over ranks is the adapter's Q."""
        return squares.double() / (dist.get_world_size() if dist.is_initialized() else 1)

    def _check_ranks_agree(self, step: int) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        assert self._measured is not None, "observe() before penalty()"
        smoothed = math.nan if self.state.smoothed is None else self.state.smoothed
        local = torch.tensor([self.lambda_, self.state.integral, smoothed], dtype=torch.float64).view(torch.int64)
        local = local.to(self._measured.device)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        bits = torch.stack(gathered).cpu()
        different = [rank for rank, row in enumerate(bits) if not torch.equal(row, bits[0])]
        if different:
            lambdas = bits.view(torch.float64)[:, 0].tolist()
            values = ", ".join(f"rank {rank} {lambdas[rank]!r}" for rank in [0, *different])
            raise ScuError(f"scu: step {step}: lambda, integral or smoothed S differ between ranks: lambda is {values}")
