"""One layout from all sides: what each pipeline rank holds, where the step's seconds go, why, and what would make it fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import JobError
from stretto.plan.asking import Asked
from stretto.plan.explain import Explainer, Where, where_it_goes
from stretto.plan.known import Known
from stretto.plan.memory import Memory
from stretto.plan.planning import Row, row_of
from stretto.plan.predict import Predictor
from stretto.plan.search import ours
from stretto.plan.wires import Wire, wires

#: Kinds of bytes, in the order in which they are shown.
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "context")


@dataclass(frozen=True)
class View:
    """row: the layout with its rates. memory: of each pipeline rank. room: bytes that a rank may hold. over: what of it is too much
    and the nearest that fits, "" where it fits. bought: what one change would buy. sent:
    what a device sends a step."""

    asked: Asked
    row: Row
    predictor: Predictor
    memory: tuple[Memory, ...]
    room: float
    where: tuple[Where, ...]
    over: str
    bought: tuple[str, ...]
    sent: tuple[Wire, ...]

    @property
    def nearest(self) -> dict[str, str]:
        """The keys that `over` says would make it fit, with their values; empty where it fits or none do."""
        _, _, change = self.over.partition("fits with ")
        return dict(re.findall(r"(\S+)=(\S+)", change))

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            **self.row.plain(),
            "ranks": [{kind: getattr(one, kind) for kind in KINDS} for one in self.memory],
            "room_bytes": self.room,
            "device_bytes": self.asked.cluster.device.memory,
            "over": self.over,
            "nearest": self.nearest,
            "bought": list(self.bought),
            "sent": [wire._asdict() for wire in self.sent],
        }


def view(asked: Asked, known: Mapping[bool, Known] | None = None) -> View:
    """The layout of a job as it is written. known: what other layouts of this model on this cluster have made.

    Raises JobError where it cannot be on the cluster.
    """
    if asked.setting is None:
        raise JobError(asked.why)
    explainer = Explainer(known or ours(asked.anatomy, asked.cluster))
    plan = explainer.plan(asked.setting, asked.compiled)
    predictor = explainer.predictor(asked.setting, asked.compiled)
    over = explainer.too_much(asked.setting, asked.compiled)
    return View(
        asked,
        row_of(asked, plan, explainer.why(plan)),
        predictor,
        tuple(predictor.memory(rank) for rank in range(asked.setting.size["pp"])),
        explainer.room,
        tuple(where_it_goes(plan)),
        over,
        tuple(explainer.bought(plan)),
        wires(predictor),
    )
