"""In which order each pipeline rank computes: the known schedules as lists of F, B, I and W. schedule/step.py adds all else.

Between ranks p, chunks v (stages a rank holds) and microbatches m. F is a forward, B a backward; I and W are a backward's
halves (input gradient, which the stage before waits for; weight gradient, which nobody waits for). With F = 1 and B = 2 (I = W = 1)
a step lasts as long as its computation and these bubbles, in units of one rank's share of the model:

    none          (p - 1) 3m           each microbatch goes through all stages alone: plain model parallelism
    gpipe         (p - 1) 3            all forwards, then all backwards (Huang et al. 2019)
    1f1b          (p - 1) 3            a backward as soon as there is one (Narayanan et al. 2021)
    interleaved   (p - 1) 3 / v        v stages a rank, one after the other in groups of microbatches (Narayanan et al. 2021)
    bfs           (p - 1) 3 / v        v stages a rank, all microbatches through each (Lamy-Poirier 2023)
    zb-h1         (p - 1) 1            1f1b whose weight gradients fill the gaps (Qi et al. 2024)
    zb-h2         (p - 1) 1            the same with more forwards ahead: no gap between a rank's first and last action
    zb-v          (p - 1) 1 / 2        two stages a rank, down and up again, as little memory as 1f1b (Qi et al. 2024)
    dualpipe-v    (p - 1) 1 / 2        two stages a rank, each forward of one paired with a backward of the other (DeepSeek-AI 2025)

The bubbles, and the activations that each rank holds at a time, are tested in tests/schedule/test_pipelines.py. DualPipe-V's
pairs run one after the other here: as one action each, as on GPUs that overlap the two, they would leave (p - 1) 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from stretto.errors import JobError
from stretto.layout.layout import split
from stretto.schedule.action import Action, Schedule
from stretto.schedule.written import count_written, written


class Place(NamedTuple):
    """Where an order is made for: pipeline rank `rank` of `ranks`, `chunks` stages a rank, `microbatches` a step."""

    rank: int
    ranks: int
    chunks: int
    microbatches: int

    def loop(self, kind: str, chunk: int, microbatch: int) -> Action:
        """Of my stage number `chunk` where stages go round: 0 1 2 0 1 2."""
        return Action(kind, chunk * self.ranks + self.rank, microbatch)

    def vee(self, kind: str, chunk: int, microbatch: int) -> Action:
        """Of my stage number `chunk` where stages go down and up again: 0 1 2 2 1 0."""
        return Action(kind, self.rank if chunk == 0 else 2 * self.ranks - 1 - self.rank, microbatch)


class Pipeline(NamedTuple):
    """A known schedule. chunks: how many stages a rank may hold, None for any number. least: microbatches that p ranks need."""

    order: Callable[[Place], Sequence[Action]]
    chunks: int | None = 1
    vee: bool = False
    least: Callable[[int], int] = lambda ranks: 1
    least_why: str = ""


def pipeline(asked: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The compute-only schedule that is asked for, by name or as file:PATH, of `ranks` pipeline ranks.

    chunks: stages a rank holds, None for the schedule's own number. Raises JobError with the legal numbers for what cannot be.
    """
    if asked.startswith(FILE):
        return written(asked.removeprefix(FILE), ranks, microbatches)
    chunks = chunks_of(asked, ranks, chunks)
    known = PIPELINES[asked if ranks > 1 or chunks > 1 else "1f1b"]  # one stage has but one order
    if microbatches < known.least(ranks):
        raise JobError(
            f'pipeline="{asked}" on pp={ranks} needs at least {known.least(ranks)} microbatches ({known.least_why}), and a step has '
            f'{microbatches}; write a smaller batch.micro_size or a larger batch.size, or pipeline="1f1b"'
        )
    orders = [tuple(known.order(Place(rank, ranks, chunks, microbatches))) for rank in range(ranks)]
    return Schedule(asked, ranks * chunks, microbatches, ranks_of_stages(ranks, chunks, known.vee), tuple(orders))


def microbatches_of(asked: str, ranks: int, microbatches: int) -> int:
    """The microbatches of a step that has rows for `microbatches`: as many, or those without which the schedule cannot be. Some
    are then empty: a short last batch goes through the same schedule."""
    if asked.startswith(FILE):
        return max(microbatches, count_written(asked.removeprefix(FILE)))
    return max(microbatches, PIPELINES[asked].least(ranks) if ranks > 1 else 1)


def chunks_of(asked: str, ranks: int, chunks: int | None) -> int:
    """Stages a rank holds; raises JobError where the schedule has another number. chunks: as asked, None if nothing was."""
    allowed = PIPELINES[asked].chunks
    if ranks == 1 and chunks is None:
        return 1
    if allowed is None:
        return chunks or LOOPED_CHUNKS.get(asked, 1)
    if chunks not in (None, allowed):
        several = " or ".join(f'"{other}"' for other in LOOPED_CHUNKS)
        raise JobError(
            f'pipeline.chunks={chunks}: pipeline="{asked}" has {allowed} stage{"s" if allowed > 1 else ""} a rank; '
            f"leave pipeline.chunks out, or write pipeline={several}"
        )
    return allowed


def ranks_of_stages(ranks: int, chunks: int, vee: bool) -> tuple[int, ...]:
    """Stage -> the pipeline rank that holds it."""
    if vee:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * chunks))


#: How a job names a schedule of its own.
FILE = "file:"
#: Stages a rank holds where nobody says how many.
LOOPED_CHUNKS: Mapping[str, int] = MappingProxyType({"interleaved": 2, "bfs": 2})


# --- the orders -----------------------------------------------------------------------------------


def _none(at: Place) -> list[Action]:
    order = []
    for m in range(at.microbatches):
        order += [at.loop("F", chunk, m) for chunk in range(at.chunks)]
        order += [at.loop("B", chunk, m) for chunk in reversed(range(at.chunks))]
    return order


def _gpipe(at: Place) -> list[Action]:
    return [at.loop(kind, 0, m) for kind in "FB" for m in range(at.microbatches)]


def _one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + list(backwards[len(forwards) - ahead :])


def _1f1b(at: Place) -> list[Action]:
    forwards, backwards = ([at.loop(kind, 0, m) for m in range(at.microbatches)] for kind in "FB")
    return _one_forward_one_backward(forwards, backwards, at.ranks - 1 - at.rank)


def _interleaved(at: Place) -> list[Action]:
    """Groups of microbatches go through chunk after chunk. A group has at least p microbatches, so that the first of them has
    come round when the last has left: m need not be a multiple of p. The groups are as equal as can be, the larger first."""
    groups = max(1, at.microbatches // at.ranks)
    bounds = [split(at.microbatches, groups, i) for i in range(groups)]
    visits = [(chunk, m) for start, stop in bounds for chunk in range(at.chunks) for m in range(start, stop)]
    forwards = [at.loop("F", chunk, m) for chunk, m in visits]
    backwards = [at.loop("B", at.chunks - 1 - chunk, m) for chunk, m in visits]
    largest = bounds[0][1]
    return _one_forward_one_backward(forwards, backwards, 2 * (at.ranks - 1 - at.rank) + (at.chunks - 1) * largest)


def _bfs(at: Place) -> list[Action]:
    forwards = [at.loop("F", chunk, m) for chunk in range(at.chunks) for m in range(at.microbatches)]
    return forwards + [action._replace(kind="B") for action in reversed(forwards)]


def _zb_h1(at: Place) -> list[Action]:
    """1f1b with the backward split; a rank puts off as many weight gradients as there are ranks before it."""
    order: list[Action] = []
    late: deque[Action] = deque()
    inputs = 0
    for action in _1f1b(at):
        if action.kind == "F":
            order.append(action)
            continue
        order.append(action._replace(kind="I"))
        late.append(action._replace(kind="W"))
        inputs += 1
        if inputs > at.rank:
            order.append(late.popleft())
    return order + list(late)


def _zb_h2(at: Place) -> list[Action]:
    """Enough forwards ahead that no rank ever waits once it has begun."""
    forwards = deque(at.loop("F", 0, m) for m in range(at.microbatches))
    order = [forwards.popleft() for _ in range(min(at.microbatches, 2 * (at.ranks - at.rank) - 1))]
    late: deque[Action] = deque()
    for m in range(at.microbatches):
        order.append(at.loop("I", 0, m))
        late.append(at.loop("W", 0, m))
        if m >= 2 * at.rank:
            order.append(late.popleft())
        if forwards:
            order.append(forwards.popleft())
    return order + list(late)


class _Counting:
    """Takes actions of a rank's two stages, each kind of each stage in the order of microbatches. A W may be put off."""

    def __init__(self, at: Place) -> None:
        self.at = at
        self.order: list[Action] = []
        self.late: deque[Action] = deque()
        self.count: Counter[tuple[str, int]] = Counter()

    def do(self, chunk: int, kinds: str) -> None:
        """The next microbatch's actions of a stage: "F", "B" (counts as I and W), or "IW"."""
        for kind in kinds:
            first = "I" if kind == "B" else kind
            self.order.append(self.at.vee(kind, chunk, self.count[first, chunk]))
            self.count[first, chunk] += 1
            self.count["W", chunk] += kind == "B"

    def pair(self, forward: int, backward: int) -> None:
        """A forward of one stage and a backward of the other."""
        self.do(forward, "F")
        self.do(backward, "B")

    def put_off(self, chunk: int) -> None:
        """An I whose W comes later."""
        self.do(chunk, "I")
        self.late.append(self.order[-1]._replace(kind="W"))
        self.count["W", chunk] += 1

    def catch_up(self) -> None:
        """The W that was put off first."""
        self.order.append(self.late.popleft())


def _zb_v(at: Place) -> list[Action]:
    """Made for at least 2p - 1 microbatches; those that are not there are left out."""
    p, q, m = at.ranks, at.rank, max(at.microbatches, 2 * at.ranks - 1)
    take = _Counting(at)
    for _ in range(2 * (p - q) - 1):
        take.do(0, "F")
    for _ in range(q):
        take.do(1, "F")
        take.do(0, "F")
    for _ in range(p - q):
        take.do(1, "FIW")
    while take.count["F", 1] < m:
        if take.count["F", 0] < m:
            take.do(0, "F")
        take.do(0, "IW")
        take.do(1, "FIW")
    for _ in range(q):
        take.do(0, "I")
        take.do(1, "I")
    for _ in range(p - q):
        take.do(0, "IW")
    for chunk in (1, 0):
        while take.count["W", chunk] < m:
            take.do(chunk, "W")
    return [action for action in take.order if (action.microbatch or 0) < at.microbatches]


def _dualpipe_v(at: Place) -> list[Action]:
    """A forward of one stage goes with a backward of the other; where there is nothing to go with, backwards are split."""
    p, q, m = at.ranks, at.rank, at.microbatches
    take = _Counting(at)
    for _ in range(2 * (p - q - 1)):
        take.do(0, "F")
    for _ in range(q + 1):
        take.do(0, "F")
        take.do(1, "F")
    for _ in range(p - q - 1):
        take.do(1, "IW")
        take.do(1, "F")
    for _ in range(m - 2 * p + q + 1):
        take.pair(0, 1)
        take.pair(1, 0)
    for _ in range(p - q - 1):
        take.do(1, "B")
        take.pair(1, 0)
    for i in range(2 * (q + 1)):  # the first half whole, then weight gradients are put off
        chunk = 1 - i % 2
        take.do(chunk, "B") if i < q + 1 else take.put_off(chunk)
    for _ in range(p - q - 1):
        take.catch_up()
        take.put_off(0)
    while take.late:
        take.catch_up()
    return take.order


#: The known schedules by name.
PIPELINES: Mapping[str, Pipeline] = MappingProxyType(
    {
        "none": Pipeline(_none, chunks=None),
        "gpipe": Pipeline(_gpipe),
        "1f1b": Pipeline(_1f1b),
        "interleaved": Pipeline(_interleaved, chunks=None),
        "bfs": Pipeline(_bfs, chunks=None),
        "zb-h1": Pipeline(_zb_h1),
        "zb-h2": Pipeline(_zb_h2, least=lambda p: 2 * p - 1, least_why="2 pp - 1"),
        "zb-v": Pipeline(_zb_v, chunks=2, vee=True),
        "dualpipe-v": Pipeline(_dualpipe_v, chunks=2, vee=True, least=lambda p: 2 * p, least_why="2 pp"),
    }
)
