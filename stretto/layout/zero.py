"""ZeRO 0-3 as a table: what is cut over the data-parallel ranks, and which collective runs at which moment.

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".) The engine runs the
rows of this table, the planner prices them and the tests count them; none of the three has a second description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["param", "grad", "optim"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "free"]
Moment = Literal[
    "before_forward",  # of a group, in each microbatch
    "after_forward",
    "before_backward",
    "after_backward",
    "last_backward",  # of the step's last microbatch only
    "after_step",
]
Event = tuple[Collective, Literal["param", "grad"]]

#: The axes ZeRO cuts over, and the axis that copies what was cut (hybrid sharding).
SHARD_AXES = ("dp", "cp")
REPLICATE_AXES = ("dp_replicate",)


@dataclass(frozen=True)
class ZeroPolicy:
    """One ZeRO stage: `cut` says what each rank holds only its part of; `moments` says what happens when.

    gradients: "each" reduces after each microbatch into the shard; "end" keeps whole gradients and reduces once a step.
    params: "microbatch" gathers cut parameters anew for each microbatch; "step" keeps them for the step once gathered.
    """

    stage: int
    cut: frozenset[Kind]
    moments: Mapping[Moment, tuple[Event, ...]]
    gradients: Literal["each", "end"] = "end"
    params: Literal["microbatch", "step"] = "microbatch"

    def does(self, moment: Moment, event: Event) -> bool:
        return event in self.moments.get(moment, ())

    @property
    def reduction(self) -> Literal["all_reduce", "reduce_scatter"]:
        """How gradients meet: as a sum on every rank, or each rank's part of the sum on that rank."""
        return "reduce_scatter" if "optim" in self.cut else "all_reduce"

    @staticmethod
    def of(stage: int, gradients: str | None = None, params: str = "microbatch") -> ZeroPolicy:
        """The row of the table, with the two choices that are open in it."""
        policy = ZERO[stage]
        moments = dict(policy.moments)
        if gradients == "end" and policy.gradients == "each":
            after = moments.pop("after_backward")
            moments["last_backward"] = tuple(event for event in after if event[1] == "grad")
            moments["after_backward"] = tuple(event for event in after if event[1] == "param")
        chosen = gradients if "grad" in policy.cut and gradients else policy.gradients
        return replace(policy, moments=MappingProxyType(moments), gradients=chosen, params=params)  # type: ignore[arg-type]


ZERO: Mapping[int, ZeroPolicy] = MappingProxyType(
    {
        0: ZeroPolicy(0, frozenset(), MappingProxyType({"last_backward": (("all_reduce", "grad"),)})),
        1: ZeroPolicy(
            1,
            frozenset({"optim"}),
            MappingProxyType({"last_backward": (("reduce_scatter", "grad"),), "after_step": (("all_gather", "param"),)}),
        ),
        2: ZeroPolicy(
            2,
            frozenset({"optim", "grad"}),
            MappingProxyType({"after_backward": (("reduce_scatter", "grad"),), "after_step": (("all_gather", "param"),)}),
            gradients="each",
        ),
        3: ZeroPolicy(
            3,
            frozenset({"optim", "grad", "param"}),
            MappingProxyType(
                {
                    "before_forward": (("all_gather", "param"),),
                    "after_forward": (("free", "param"),),
                    "before_backward": (("all_gather", "param"),),
                    "after_backward": (("reduce_scatter", "grad"), ("free", "param")),
                }
            ),
            gradients="each",
        ),
    }
)


class GroupFacts(NamedTuple):
    """What the table needs to know of one group of parameters.

    elements: size of its flat buffer, padding included. kept: once gathered it stays so until the microbatch's backward ends
    (its modules may run several times or not at all, or its weights are shared).
    """

    name: str
    elements: int
    trainable: bool = True
    kept: bool = False


class Call(NamedTuple):
    """One collective of a step, in the words of the Ledger. reason: which moment, of which group."""

    collective: str
    axes: tuple[str, ...]
    elements: int
    what: Literal["param", "grad"]
    reason: str


def calls(
    policy: ZeroPolicy, groups: tuple[GroupFacts, ...], microbatches: int, replicas: int = 1, shards: int = 1, pipelined: bool = False
) -> list[Call]:
    """Every ZeRO collective of one whole training step, in the order in which each lane issues it.

    groups: in the order of the forward pass. elements: of the whole buffer that is reduced or gathered; for the replicas'
    all-reduce of a shard, of that shard (even cuts). pipelined: other microbatches and stages run between a microbatch's forward
    and its backward, so that kept groups are gathered for each of the two. REFERENCE B9 follows by adding these up.
    """
    out: list[Call] = []

    def add(collective: Collective, what: Literal["param", "grad"], group: GroupFacts, moment: str) -> None:
        axes = SHARD_AXES if collective != "all_reduce" else REPLICATE_AXES + SHARD_AXES
        out.append(Call(collective, axes, group.elements, what, f"{moment} {group.name}"))

    def reduce(group: GroupFacts, moment: str) -> None:
        add(policy.reduction, "grad", group, moment)

    gathered: set[str] = set()
    for microbatch in range(microbatches):
        last = microbatch == microbatches - 1
        for group in groups:
            if policy.does("before_forward", ("all_gather", "param")) and group.name not in gathered:
                add("all_gather", "param", group, "before_forward")
                gathered.add(group.name)
            if policy.does("after_forward", ("free", "param")) and policy.params == "microbatch" and not (group.kept and not pipelined):
                gathered.discard(group.name)
        for group in reversed(groups):
            if policy.does("before_backward", ("all_gather", "param")) and group.name not in gathered:
                add("all_gather", "param", group, "before_backward")
                gathered.add(group.name)
            if group.trainable and policy.does("after_backward", (policy.reduction, "grad")):
                reduce(group, "after_backward")
            if group.trainable and last and policy.does("last_backward", (policy.reduction, "grad")):
                reduce(group, "last_backward")
        if policy.params == "microbatch":
            gathered.clear()
    if replicas > 1 and policy.reduction == "reduce_scatter":
        for group in groups:
            if group.trainable:
                out.append(Call("all_reduce", REPLICATE_AXES, group.elements // shards, "grad", f"replicas {group.name}"))
    if policy.does("after_step", ("all_gather", "param")):
        for group in groups:
            if group.trainable:
                add("all_gather", "param", group, "after_step")
    return out


def held_elements(policy: ZeroPolicy, elements: int, shards: int) -> dict[Kind, int]:
    """Elements one rank keeps of a trainable group between steps: of parameters, of gradients, and per optimizer moment (REFERENCE B1)."""
    part = -(-elements // shards)
    whole_gradient = "grad" not in policy.cut or policy.gradients == "end"
    return {
        "param": part if "param" in policy.cut else elements,
        "grad": elements if whole_gradient else part,
        "optim": part if "optim" in policy.cut else elements,
    }
