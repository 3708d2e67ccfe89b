"""What the training loop holds of the Shannon Control Unit: the loss term, the measurement, lambda and its records.

An optimizer step t of the loop, seen from here:

    last micro-step:  forward, by loss(t) where reference text is in its pack; term(t) takes in S (or K) of step t-1,
                      which moves lambda; backward of loss + term
    reduction:        the loop sums (loss, tokens, measured_local()) over the ranks, as it had to for the loss anyway
    observe(t, ...):  starts a copy of the three sums to the host and returns at once; step t steers step t+1

Nothing waits for the device but the check, every `scu.check_every` steps, that lambda has the same bits on all ranks.
Evaluation never comes here. A fault raises ScuFault on every rank; nothing falls back to the plain loss.
"""

import json
import math
from collections.abc import Callable, Iterable
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
from trainer.scu.fit import Fit
from trainer.scu.information import AdapterInformation, data_bpt
from trainer.scu.law_settings import as_the_law_allows, information_of, law_of

MIB = 2**20
KNOWN_BY_HEART = 1e-3
"""DataBPT below which nothing is left to learn: runs that overfit end at 0.002 (docs/lab/scu.md)."""


class ScuFault(RuntimeError):
    """The controller cannot go on: a measurement that is no number, or ranks that disagree about lambda."""


@dataclass(frozen=True)
class _Pending:
    """A measurement on its way to the host: (loss sum in nats, target tokens, Q or sum of KL in nats, whether the step
    counts) in fp64."""

    step: int
    sums: Tensor
    arrived: torch.cuda.Event | None
    memory_mb: float

    def wait(self) -> list[float]:
        """The numbers; the copy was started a step ago, so that this seldom waits."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [float(number) for number in self.sums.tolist()]


class Steering:
    """The Shannon Control Unit of one run.

    `target_tokens` is N, the target tokens of one epoch (`scu.tokens` overrides it), `total_steps` the optimizer steps
    planned, `base_parameters` the size of the base model, which `scu.target: auto` looks at. `divergence` is what
    `scu.measure: kl` holds. Raises UserError for settings that cannot work.
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
            self.information = information_of(section, model, self.tokens)
        self.law = law_of(section, total_steps=total_steps, base_parameters=base_parameters)
        self.state = scu.initial(self.law)
        self.records: list[dict[str, Any]] = []
        self.fitted: Fit | None = None
        """Set at the end of a run whose target the adapter was scaled to."""
        self._pending: _Pending | None = None
        self._measured: Tensor | None = None
        self._squares = self.information.squares if self.information is not None else None

    @property
    def lambda_(self) -> float:
        """lambda as it stands."""
        return self.state.lambda_

    def play_back(
        self,
        term: Callable[[Callable[[], Tensor]], Callable[[], Tensor]],
        with_reference: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        """Let training measure by these: the adapter's factors by `term(measure)`, outputs of `kl` by the other."""
        if self._squares is not None:
            self._squares = term(self._squares)
        if self.divergence is not None:
            self.divergence.with_reference = with_reference

    def check_target(
        self,
        data_bpt_now: float,
        planned_learning_rates: Iterable[float],
        *,
        b_ratio: float = 1.0,
        resumes: bool = False,
    ) -> list[str]:
        """Refuse a target that S cannot reach from here; every rank must call it, before the first step.

        A run that `resumes` is told, and goes on: few steps may be left, and what it has come to is not to be lost.

        `data_bpt_now`: bits per target token of the model as it is, the same number on every rank.
        `planned_learning_rates`: of A at every optimizer step to come; `b_ratio`: that of B over it (LoRA+). AdamW
        moves an element by about the learning rate at most. S rises as DataBPT falls, however small the update is: too
        high is only a target that would need a text known by heart. Returns warnings; raises UserError with the range.
        """
        if self.law.controller != "pi" or self.information is None:
            return []
        reach = math.fsum(planned_learning_rates)
        squares = self.information.reachable_squares(reach, reach * b_ratio)
        bits_low, bits_high = (self.information.bits(bound) for bound in squares)
        low = scu.s_ratio(data_bpt_now, bits_low)
        now_global = sum_over_ranks(self._mean_over_ranks(self.information.squares().detach()))
        now = scu.s_ratio(data_bpt_now, self.information.bits(now_global.item()))
        target = self.law.target
        high = scu.s_ratio(KNOWN_BY_HEART, bits_high)
        warnings = [warning] if (warning := scu.gain_warning(self.law)) else []
        if not low <= target <= high:
            line = (
                f"scu.target={target:g}: out of reach; S is {now:.3g} now, and these learning rates keep it within "
                f"[{low:.3g}, {high:.3g}], from the loss there is now to a text known by heart; choose a target "
                f"inside, or change scu.sigma={self.section.sigma:g}"
            )
            if not resumes:
                raise UserError(line)
            warnings.append(line)
        if now > target + self.law.deadband and self.section.measure == "factors":
            warnings.append(
                f"scu.target={target:g}: S starts at {now:.3g}, mostly the random start of A; delta would start at 0"
            )
        return warnings

    def loss(self, step: int, batch: Any) -> Tensor | None:
        """The loss sum of the step's last micro-batch where reference text rides in its pack; None where it does not.

        Call it on every rank, in place of the forward pass before `term`. Only where lambda works: without it no
        gradient is wanted, and a pass of its own keeps nothing. What it goes by is lambda without the newest
        measurement, for which a GPU would have to be waited for here.
        """
        if self.divergence is None or not self.divergence.packed or self.lambda_ == 0:
            return None
        return self.divergence.loss(step, batch)

    def term(self, step: int) -> Tensor:
        """lambda ln 2 ParamBPT, or lambda K: nats per token, differentiable, for the loss of step `step` (from 1).

        Call it once per step, on every rank, between the last micro-step's forward and its backward. Its mean over the
        ranks is the term, which is what the engine's averaging makes of it.
        """
        self.settle()
        if self.divergence is not None:
            term = self.divergence.term(step, self.lambda_)
            self._measured = self.divergence.local()
            return term
        assert self.information is not None and self._squares is not None
        squares = self._squares()
        self._measured = squares.detach()
        if self.law.controller == "none":
            return torch.zeros_like(self._measured)
        return squares * (self.lambda_ * self.information.nats_per_square)

    def measured_local(self) -> Tensor:
        """This rank's addend to Q, or to the sum of KL: fp64 on the device, summed with the losses of the step."""
        if self._measured is None:
            raise ScuFault("scu: measured_local() without term() in this step")
        return self._measured if self.divergence is not None else self._mean_over_ranks(self._measured)

    def observe(
        self,
        step: int,
        loss_sum_global: Tensor,
        target_tokens_global: Tensor | int,
        measured_global: Tensor,
        applied: Tensor | bool = True,
    ) -> None:
        """Take in the sums of step `step` over all ranks and micro-steps, without waiting for the device.

        Call it on every rank. A step that was not `applied` leaves the controller as it is.
        """
        if step % self.section.check_every == 0:
            self._check_ranks_agree(step)
        if step % self.section.every:
            return  # no control step
        device = measured_global.device
        measured = measured_global.detach().double()
        tokens = target_tokens_global
        # A number becomes a tensor by a fill on the device; a copy from the host would wait for it.
        count, done = (
            value.to(device, torch.float64) if isinstance(value, Tensor) else measured.new_full((), float(value))
            for value in (tokens, applied)
        )
        sums = torch.stack([loss_sum_global.detach().to(device, torch.float64), count, measured, done])
        arrived = None
        if device.type == "cuda":
            host = torch.empty(4, dtype=torch.float64, pin_memory=True)
            sums = host.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        memory = torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else 0.0
        self._pending = _Pending(step, sums, arrived, memory)

    def settle(self) -> None:
        """Let the measurement under way, if any, move lambda. `term` does it; sooner gives the same lambda."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        loss_sum, tokens, measured, counts = pending.wait()
        if not counts or tokens == 0:
            return  # a step that was skipped, or one without a token to measure on
        if not math.isfinite(loss_sum) or not math.isfinite(measured) or loss_sum < 0:
            what = "adapter" if self.divergence is None else "divergence from the base"
            raise ScuFault(
                f"scu: step {pending.step} measured a loss sum of {loss_sum} nats over {tokens:g} target tokens and "
                f"{measured} for the {what}; look at the loss of that step, or lower training.learning_rate"
            )
        lambda_, data = self.lambda_, data_bpt(loss_sum, tokens)
        if self.divergence is not None:
            bits = self.divergence.bits(pending.step, measured)
            self.state = scu.advance(self.law, self.state, bits)
            found = {"kl_bits": bits, "kl_smoothed": self.state.smoothed}
        else:
            assert self.information is not None
            bits = self.information.bits(measured)
            self.state = scu.advance(self.law, self.state, scu.s_ratio(data, bits))
            found = {"param_bpt": bits, "s_ratio": self.state.measured, "s_smoothed": self.state.smoothed}
        ce_loss, reg_loss = loss_sum / tokens, lambda_ * math.log(2.0) * bits
        self.records.append(
            {
                "step": pending.step,
                "ce_loss": ce_loss,
                "reg_loss": reg_loss,
                "total_loss": ce_loss + reg_loss,
                "data_bpt": data,
                **found,
                "lambda": lambda_,
                "integral_term": self.state.integral,
                "error": self.state.error,
                "cuda_memory_mb": pending.memory_mb,
            }
        )

    def metrics(self) -> dict[str, float]:
        """`scu/*` of the last measurement that has arrived, which is of the step before unless `settle` was called."""
        values = {"scu/lambda": self.lambda_}
        if self.law.controller == "pi":
            values["scu/target"] = self.law.target
        if self.records:
            last = self.records[-1]
            shown = ("s_ratio", "s_smoothed", "param_bpt", "kl_bits", "kl_smoothed", "data_bpt", "error")
            values |= {f"scu/{name}": last[name] for name in shown if name in last}
            if self.law.form == "published":
                values["scu/integral"] = last["integral_term"]
        return values

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the controller, and the measurement that is to steer the next step."""
        pending = None
        if self._pending is not None:
            pending = {
                "step": self._pending.step,
                "sums": self._pending.wait(),
                "memory_mb": self._pending.memory_mb,
            }
        return {"controller": self.state.to_dict(), "pending": pending}

    def load_state_dict(self, values: dict[str, Any], *, step: int, run_dir: Path | None = None) -> list[str]:
        """Continue after optimizer step `step`, with the records that the run wrote into `run_dir` so far.

        Returns what the console has to say of settings that were changed on purpose.
        """
        self.state, notes = as_the_law_allows(self.law, scu.State.from_dict(values["controller"]))
        pending = values["pending"]
        self._pending = pending and _Pending(
            pending["step"], torch.tensor(pending["sums"], dtype=torch.float64), None, pending["memory_mb"]
        )
        settled_until = self._pending.step - 1 if self._pending else step
        path = run_dir / "scu_metrics.json" if run_dir else None
        if path is not None and path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            self.records = [record for record in written if record["step"] <= settled_until]
        return notes

    def write_files(self, run_dir: Path) -> None:
        """Write scu_config, scu_metrics and scu_history.json, on rank 0: at checkpoints, after `settle` at the end."""
        config = self.section.model_dump(mode="json") | {
            "target": self.law.target,
            "tokens": self.tokens,
            "total_updates": self.law.total_updates,
        }
        if self.fitted is not None:
            config["fitted"] = asdict(self.fitted)
        if self.law.form == "published":
            config["gain_bound"] = scu.gain_bound(self.law.target)
        on_gpu = torch.cuda.is_available()
        history = {
            **({} if self.divergence is not None else {"s_ratio_history": [r["s_ratio"] for r in self.records]}),
            **({} if self.divergence is None else {"kl_bits_history": [r["kl_bits"] for r in self.records]}),
            "lambda_history": [record["lambda"] for record in self.records],
            "target_s_ratio" if self.divergence is None else "target_kl_bits": self.law.target,
            "peak_cuda_memory_mb": torch.cuda.max_memory_allocated() / MIB if on_gpu else 0.0,
            "cuda_memory_stats": dict(torch.cuda.memory_stats()) if on_gpu else {},
        }
        for name, content in (("config", config), ("metrics", self.records), ("history", history)):
            write_json(run_dir / f"scu_{name}.json", content)
        if self.divergence is not None:
            self.divergence.write(run_dir)

    def _mean_over_ranks(self, squares: Tensor) -> Tensor:
        """Q of this rank over the number of ranks: what sums to the adapter's Q, with the same bits on every rank."""
        return squares.double() / (dist.get_world_size() if dist.is_initialized() else 1)

    def _check_ranks_agree(self, step: int) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        assert self._measured is not None, "observe() before term()"
        smoothed = math.nan if self.state.smoothed is None else self.state.smoothed
        mine = torch.tensor([self.lambda_, self.state.integral, smoothed], dtype=torch.float64).view(torch.int64)
        mine = mine.to(self._measured.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        bits = torch.stack(everyone).cpu()
        different = [rank for rank, row in enumerate(bits) if not torch.equal(row, bits[0])]
        if different:
            lambdas = bits.view(torch.float64)[:, 0].tolist()
            listed = ", ".join(f"rank {rank} {lambdas[rank]!r}" for rank in [0, *different])
            raise ScuFault(f"scu: step {step}: lambda, integral or smoothed S differ between ranks: lambda is {listed}")
