"""Forwards and backwards of this rank's stages, and the messages between stages: what F, B, I, W, SEND and RECV do.

A microbatch of which this rank has no rows takes no computation and no message (the ranks of a pipeline have the same rows), but
its part in what other ranks gather and reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.data.batch import Batch
from stretto.engine.underway import Between, Key
from stretto.errors import RunError
from stretto.parallel.boundary import Boundary
from stretto.schedule.action import Action

if TYPE_CHECKING:
    from stretto.engine.engine import Engine
    from stretto.parallel.parallelize import Stage


class Passes:
    """The handlers of one engine. What is on its way stands in the step's own Flow."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.boundary = Boundary(engine.parallel.pipeline)
        self.stages = {stage.number: stage for stage in engine.parallel.stages}
        self.rank_of = engine.parallel.split.rank_of
        #: Whether a forward of ours is under way, and not one of a loop of the user's own.
        self.calling = False
        self._seen: set[int] = set()

    @property
    def do(self) -> Mapping[str, Callable[[Action], None]]:
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_of_inputs,
            "W": self.backward_of_weights,
            "SEND_F": self.send_forward,
            "RECV_F": self.receive_forward,
            "SEND_B": self.send_backward,
            "RECV_B": self.receive_backward,
        }

    # -- computation -----------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        stage, key, now = self.stages[action.stage], _key(action), self.engine.now
        microbatch = self._rows(action)
        given = None if microbatch is None or stage.first else self._input(key)
        now.timeline.arrived()
        stage.walk.begin_forward()
        output: Tensor | None = None
        if microbatch is not None:
            microbatch = microbatch.to(self.engine.world.device, self.engine.precision.compute)
            whole = self._call(stage, microbatch, given)
            if not stage.last:
                output = whole
            elif now.finish is not None:
                output = now.finish(whole, microbatch)
        stage.walk.end_forward()
        if output is None:
            return
        if torch.is_grad_enabled():
            now.flow.between[key] = Between(given, output, stage.walk.straight)
        if not stage.last:
            self._hand_on(stage.number, key[1], output)

    def backward(self, action: Action) -> None:
        self._back(action, split=False)

    def backward_of_inputs(self, action: Action) -> None:
        """Gradients of activations; those of parameters wait for backward_of_weights."""
        self._back(action, split=True)
        self.engine.now.flow.postponed[_key(action)] = self.stages[action.stage].walk.take_postponed()

    def backward_of_weights(self, action: Action) -> None:
        walk, now = self.stages[action.stage].walk, self.engine.now
        walk.weights(now.flow.postponed.pop(_key(action)), last=now.lasts[action.stage] == action)
        self.engine.memory.look()

    def _back(self, action: Action, split: bool) -> None:
        stage, key, now = self.stages[action.stage], _key(action), self.engine.now
        multiplier = self.engine.multiplier()  # on a rank without rows too: every rank's update makes up for the same number
        between = now.flow.between.pop(key, None)
        gradient = None if between is None or stage.last else self._gradient(key)
        now.timeline.arrived()
        stage.walk.begin_backward(now.lasts[action.stage] == action, between.straight if between else None, split)
        if between is not None and between.output.requires_grad:
            if stage.last:
                (between.output * multiplier).backward()
            else:
                torch.autograd.backward(between.output, gradient)
        stage.walk.end_backward()
        if between is not None and between.input is not None:
            found = between.input.grad
            self._hand_back(stage.number, key[1], torch.zeros_like(between.input) if found is None else found)
        self.engine.memory.look()

    def _rows(self, action: Action) -> Batch | None:
        """The microbatch, if it has rows on this rank."""
        microbatch = self.engine.now.microbatches[action.microbatch or 0]
        return microbatch if microbatch is not None and microbatch.rows else None

    def _call(self, stage: Stage, microbatch: Batch, given: Tensor | None) -> Any:
        """The stage's own forward. given: what the stage before made."""
        stream = self.engine.tensors.stream
        self.engine.draws.begin(self.engine.steps, microbatch.first, tokens_of(microbatch))
        stream.forget()  # a block that ran again in backward has left it elsewhere
        stream.cuts_logits = self.engine.cuts_logits
        head_loss = self.engine.head_loss if stage.last and not self.engine.now.whole else None
        if head_loss is not None:
            head_loss.targets = microbatch["shift_labels"]
        self.calling = True
        try:
            return stage.passage.run(lambda: self._watched(stage, microbatch), given)
        finally:
            self.calling = False
            stream.cuts_logits = False
            if head_loss is not None:
                head_loss.targets = None
            stream.forget()

    def _watched(self, stage: Stage, microbatch: Batch) -> Any:
        """The model's forward. Raises RunError where tp ranks would go apart: in its first, something draws from torch's own stream."""
        alone = self.engine.tensors.group.size == 1 or self.engine.world.transport.name == "threads"  # threads share one stream
        if alone or stage.number in self._seen or not stage.model.training:
            return self.engine.forward(stage.model, microbatch)
        self._seen.add(stage.number)
        before = torch_streams(self.engine.world.device)
        output = self.engine.forward(stage.model, microbatch)
        if any(not torch.equal(a, b) for a, b in zip(before, torch_streams(self.engine.world.device), strict=True)):
            raise RunError(
                "the model's forward draws from torch's own random stream (F.dropout, say), and tp ranks would draw differently; "
                "use nn.Dropout, whose masks stretto names, or a mesh without tp"
            )
        return output

    # -- from stage to stage ---------------------------------------------------------------------------------------

    def _input(self, key: Key) -> Tensor:
        """What the stage before made, as a leaf whose gradient is kept."""
        flow = self.engine.now.flow
        x = flow.arriving.pop(key).wait() if key in flow.arriving else flow.inputs.pop(key)
        return x.requires_grad_(torch.is_grad_enabled())

    def _gradient(self, key: Key) -> Tensor:
        flow = self.engine.now.flow
        return flow.returning.pop(key).wait() if key in flow.returning else flow.gradients.pop(key)

    def _hand_on(self, stage: int, m: int, output: Tensor) -> None:
        flow = self.engine.now.flow
        if self.rank_of[stage] == self.rank_of[stage + 1]:
            flow.inputs[stage + 1, m] = output.detach()
        else:
            flow.outgoing[stage, m] = output

    def _hand_back(self, stage: int, m: int, gradient: Tensor) -> None:
        flow = self.engine.now.flow
        if self.rank_of[stage] == self.rank_of[stage - 1]:
            flow.gradients[stage - 1, m] = gradient
        else:
            flow.leaving[stage, m] = gradient

    def send_forward(self, action: Action) -> None:
        microbatch = self._rows(action)
        if microbatch is not None:
            output = self.engine.now.flow.outgoing.pop(_key(action))
            self.boundary.send_forward(output, self.rank_of[action.stage + 1], action.stage, microbatch)

    def receive_forward(self, action: Action) -> None:
        microbatch = self._rows(action)
        if microbatch is not None:
            source = self.rank_of[action.stage - 1]
            self.engine.now.flow.arriving[_key(action)] = self.boundary.receive_forward(source, action.stage, microbatch)

    def send_backward(self, action: Action) -> None:
        if self._rows(action) is not None:
            gradient = self.engine.now.flow.leaving.pop(_key(action))
            self.boundary.send_backward(gradient, self.rank_of[action.stage - 1], action.stage)

    def receive_backward(self, action: Action) -> None:
        if self._rows(action) is not None:
            output = self.engine.now.flow.between[_key(action)].output
            self.engine.now.flow.returning[_key(action)] = self.boundary.receive_backward(self.rank_of[action.stage + 1], output)


def torch_streams(device: torch.device) -> list[Tensor]:
    """Where torch's own random streams stand, on the CPU and on this GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def tokens_of(batch: Batch) -> tuple[int, int]:
    """Rows, and tokens of a row (0: nobody says)."""
    ids = batch.get("input_ids")
    return batch.rows, ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 0


def tie(engine: Engine) -> None:
    """Add the gradients of all copies of tied weights, in the order of stages, so that each copy gets the same bits.

    The copies are cut alike: ranks of one dp coordinate have the same part of them.
    """
    parallel, stages = engine.parallel, engine.parallel.pipeline
    rank_of, here = parallel.split.rank_of, parallel.pipeline.index
    mine = {stage.number: stage.tied for stage in parallel.stages if stage.tied}
    for number in range(max((len(tied) for tied in mine.values()), default=0)):
        groups = {stage: tied[number] for stage, tied in mine.items()}
        if not all(group.trainable for group in groups.values()):
            continue
        parts = {stage: group.update_gradient().clone() for stage, group in groups.items()}
        others = sorted({rank_of[stage] for stage in parallel.tied} - {here})
        sends = [stages.send(part, rank, reason=f"tied {stage}") for rank in others for stage, part in sorted(parts.items())]
        like = next(iter(parts.values()))
        for stage in (stage for stage in parallel.tied if rank_of[stage] != here):
            parts[stage] = torch.empty_like(like)
            stages.receive(parts[stage], rank_of[stage]).wait()
        for pending in sends:
            pending.wait()
        total = parts[min(parts)].clone()
        for stage in sorted(parts)[1:]:
            total += parts[stage]
        for group in groups.values():
            group.release()  # peers may still read what is written now
            group.update_gradient().copy_(total)


def _key(action: Action) -> Key:
    return action.stage, action.microbatch or 0
