"""How a step ends: what REDUCE, TIE, VOTE and UPDATE do. All ranks come to one verdict, then each updates its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.engine.optimizer import lr_factor
from stretto.engine.passes import tie
from stretto.engine.runner import Culprit
from stretto.errors import NonFinite
from stretto.parallel.parallelize import sum_over_tp
from stretto.schedule.action import Action

if TYPE_CHECKING:
    from stretto.engine.engine import Engine


class Ending:
    """The handlers of one engine. What they come to stands in the step's own Underway."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def do(self) -> Mapping[str, Callable[[Action], None]]:
        return {"REDUCE": self.reduce, "TIE": self.tie, "VOTE": self.vote, "UPDATE": self.update}

    # -- gradients -------------------------------------------------------------------------------------------------

    def reduce(self, action: Action) -> None:
        """Start what is left to reduce of a stage; nobody waits before all stages are through."""
        self.engine.parallel.stage(action.stage).walk.reduce_rest()

    def tie(self, action: Action) -> None:
        """Add up the gradients of copies of one weight in several stages."""
        self._settle()
        tie(self.engine)

    def _settle(self) -> None:
        """Wait for all reductions, once a step, then add the parts of all copies."""
        now, groups = self.engine.now, self.engine.parallel.groups
        if now.settled:
            return
        now.settled = True
        for group in groups:
            group.wait_reduced()
        for group in groups:
            group.reduce_replicas()
        for group in groups:
            group.wait_reduced()
        sum_over_tp(self.engine.parallel)

    # -- the verdict -----------------------------------------------------------------------------------------------

    def vote(self, action: Action) -> None:
        """One sum over all ranks: loss, counts, squared norm, wish to stop; with it every rank comes to the same verdict."""
        engine, now = self.engine, self.engine.now
        self._settle()
        engine.passes.boundary.settle()
        now.sums[3] = self._squared_norm()
        now.sums[4] = float(engine.asked_to_stop())
        engine.everybody.all_reduce(now.sums, reason="vote", lane="vote").wait()
        now.timeline.arrived()
        now.loss_sum, now.count, now.rows, squares, stops = now.sums.tolist()
        engine.stopping = stops > 0
        after = self.after()
        now.grad_norm = math.sqrt(squares) * abs(after) if squares >= 0 else math.nan
        if not (math.isfinite(now.grad_norm) and math.isfinite(now.loss_sum)):
            now.status = "skipped"
        elif now.count == 0:
            now.status = "empty"

    def _squared_norm(self) -> Tensor:
        """Sum of squares over my part of the gradient; the parts of all ranks are the whole, once: copies speak only once."""
        total = torch.zeros((), dtype=torch.float64, device=self.engine.world.device)
        for group in self.engine.parallel.groups:
            if group.trainable and not group.copied:
                for part in group.counted_gradient():
                    total += torch.linalg.vector_norm(part).to(torch.float64) ** 2
        return total

    def after(self) -> float:
        """What the reduced gradients are still to be multiplied with, to be those of the sum of losses / the count."""
        now, scale = self.engine.now, self.engine.scale
        if now.count == 0:
            return 1.0
        exact = 1.0 if now.expected == now.count else 1.0 / (now.before * now.count)
        return exact / (scale.scale if scale else 1.0)

    # -- the update ------------------------------------------------------------------------------------------------

    def update(self, action: Action) -> None:
        """As the verdict says: update, pass the step over, or find out whose gradient was not finite."""
        engine, now = self.engine, self.engine.now
        if engine.scale and now.status != "empty":
            engine.scale.update(now.status == "committed")
        engine.skips = engine.skips + 1 if now.status == "skipped" else 0
        factor = lr_factor(engine.job.schedule, engine.updates, engine.total_steps)
        now.lr = factor * (engine.base_lr[0] if engine.base_lr else 0.0)
        if now.status == "committed":
            self._commit(factor)
        elif now.status == "skipped":
            self._blame()
        for stage in engine.parallel.stages:
            stage.walk.end_step()

    def _commit(self, factor: float) -> None:
        engine, clip = self.engine, self.engine.job.clip
        multiplier = self.after() * (min(1.0, clip / (engine.now.grad_norm + 1e-6)) if clip else 1.0)
        trainable = [group for group in engine.parallel.groups if group.trainable]
        for group in trainable:
            group.release()  # after the vote nobody reads any more: no wait
            if multiplier != 1.0:
                group.update_gradient().mul_(multiplier)
            group.attach_gradients()
        if engine.optimizer is not None:
            for parameters, base in zip(engine.optimizer.param_groups, engine.base_lr, strict=True):
                parameters["lr"] = base * factor
            engine.optimizer.step()
        for group in trainable:
            group.publish()
        for group in trainable:
            group.wait_published()
        engine.updates += 1

    def _blame(self) -> None:
        """Find out, on all ranks together, whose gradient it was; stop after too many skips in a row."""
        engine, now = self.engine, self.engine.now
        mine = [name for group in engine.parallel.groups for name in group.nonfinite()]
        found = engine.everybody.objects(mine, reason="blame")
        now.culprits = tuple(Culprit(rank, name) for rank, names in enumerate(found) for name in names)
        first = (
            f"first: {now.culprits[0].tensor} on rank {now.culprits[0].rank}"
            if now.culprits
            else "no rank had one by itself: the sum overflowed"
        )
        now.why = f"the gradient is not finite ({first})"
        if engine.skips >= engine.job.precision.max_skips:
            advice = "use precision=bf16" if engine.scale else "lower optimizer.lr or look at the batch"
            raise NonFinite(
                f"step {engine.steps}: {engine.skips} steps in a row were skipped, {now.why}; {advice}, or raise precision.max_skips"
            )
