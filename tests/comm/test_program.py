"""Any collective by any algorithm, between ranks that are threads or processes: what torch gives on all the data at once."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor
from torch.distributed import Store

from stretto.comm.group import Group, Ledger
from stretto.comm.machine import Machine
from stretto.comm.messages import CHUNK, Messages
from stretto.comm.program import pieces
from stretto.comm.shm import SharedMemory
from stretto.comm.threads import Office, run_threads
from stretto.comm.transport import GlooMail, World
from stretto.errors import JobError, PeerLost
from stretto.layout.layout import split
from stretto.layout.mesh import Mesh
from stretto.schedule.algorithms import possible, program
from stretto.schedule.collective import COLLECTIVES, Hop, Program
from stretto.schedule.price import traffic

BIG = 1_000_003
DTYPES = (torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.uint8)
NAMES = [(collective, algorithm) for collective in COLLECTIVES for algorithm in possible(collective)]


@dataclass(frozen=True)
class Case:
    """One collective call: what every rank brings, and into how many elements each part of it is cut."""

    collective: str
    algorithm: str
    inputs: tuple[Tensor, ...]
    parts: tuple[int, ...]
    root: int = 0
    op: str = "sum"

    @staticmethod
    def of(names: tuple[str, str], n: int, parts: Sequence[int], dtype: torch.dtype, root: int = 0, op: str = "sum") -> Case:
        generator = torch.Generator().manual_seed(sum(parts) + 31 * n)
        inputs = []
        for rank in range(n):  # small whole numbers: their sums are exact in every dtype, in any order
            size = sum(parts[rank * n : rank * n + n]) if names[0] == "all_to_all" else sum(parts)
            inputs.append(torch.randint(0, 9, (size,), generator=generator, dtype=torch.int64).to(dtype))
        return Case(*names, tuple(inputs), tuple(parts), root, op)

    def call(self, group: Group) -> Tensor:
        """This rank's part of it; returns what it has afterwards."""
        x, bounds = self.inputs[group.index].clone(), [0, *accumulate(self.parts)]
        mine = self.parts[group.index] if len(self.parts) == group.size else 0
        into, more = x.new_zeros(mine), {"reason": "test", "algorithm": self.algorithm}
        if self.collective == "all_reduce":
            group.all_reduce(x, op=self.op, **more).wait()
        elif self.collective == "broadcast":
            group.broadcast(x, self.root, **more).wait()
        elif self.collective == "reduce":
            group.reduce(x, self.root, op=self.op, **more).wait()
        elif self.collective == "all_gather":
            group.all_gather(x, bounds, **more).wait()
        elif self.collective == "gather":
            group.gather(x, bounds, self.root, **more).wait()
        elif self.collective == "reduce_scatter":
            group.reduce_scatter(x, bounds, into=into, **more).wait()
            assert torch.equal(x, self.inputs[group.index])  # nothing but `into` is written
            return into
        elif self.collective == "scatter":
            group.scatter(x, bounds, self.root, into=into, **more).wait()
            assert torch.equal(x, self.inputs[group.index])
            return into
        elif self.collective == "all_to_all":
            counts = torch.tensor(self.parts).view(group.size, group.size)
            into = x.new_zeros(int(counts[:, group.index].sum()))
            group.all_to_all(x, counts.tolist(), into=into, **more).wait()
            assert torch.equal(x, self.inputs[group.index])
            return into
        else:
            group.barrier(**more).wait()
        return x

    def expected(self, rank: int) -> Tensor:
        """What this rank has afterwards, by torch on all the data at once."""
        n, own = len(self.inputs), self.inputs[rank]
        if self.collective == "all_to_all":
            return torch.cat([x.split(self.parts[i * n : i * n + n])[rank] for i, x in enumerate(self.inputs)])
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[self.op]
        total = functools.reduce(combine, self.inputs)
        if self.collective in ("all_reduce", "reduce"):
            return total if self.collective == "all_reduce" or rank == self.root else own
        if self.collective in ("broadcast", "scatter"):
            sent = self.inputs[self.root]
            return sent if self.collective == "broadcast" else sent.split(self.parts)[rank]
        if self.collective == "reduce_scatter":
            return total.split(self.parts)[rank]
        gathered = self.collective == "all_gather" or (self.collective == "gather" and rank == self.root)
        return torch.cat([x.split(self.parts)[i] for i, x in enumerate(self.inputs)]) if gathered else own


def parts_of(collective: str, n: int, size: int) -> list[int]:
    """`size` elements in the parts that the collective has, as evenly as can be."""
    count = {"one": 1, "ranks": n, "pairs": n * n}[COLLECTIVES[collective].parts]
    return [stop - start for start, stop in (split(size, count, i) for i in range(count))]


def check(world: World, cases: Sequence[Case]) -> int:
    """All cases on this rank, one after the other in one group; how many there were."""
    group = Group(world, Mesh.of(dp=world.size), ("dp",), Ledger())
    for case in cases:
        found, expected = case.call(group), case.expected(group.index)
        assert found.dtype == expected.dtype and torch.equal(found, expected), f"{case.algorithm} {case.collective} {case.parts}"
    return len(cases)


def small_cases(n: int, every_size: bool) -> list[Case]:
    """All collectives by all algorithms, at all sizes on both sides of n, or at two of them drawn for each."""
    sizes, pick, cases = sorted({0, 1, n - 1, n, 5 * n + 3}), random.Random(n), []
    for names in NAMES:
        for size in sizes if every_size else pick.sample(sizes, k=2):
            op = pick.choice(("sum", "max", "min")) if names[0] in ("all_reduce", "reduce") else "sum"
            cases.append(Case.of(names, n, parts_of(names[0], n, size), pick.choice(DTYPES), pick.randrange(n), op))
    return cases


@pytest.mark.parametrize("n", range(1, 9))
def test_every_collective_by_every_algorithm_gives_what_torch_gives(n: int) -> None:
    cases = small_cases(n, every_size=False)
    assert run_threads(lambda world: check(world, cases), n) == [len(cases)] * n


@pytest.mark.grid
@pytest.mark.parametrize("n", range(1, 9))
def test_every_collective_by_every_algorithm_at_every_size(n: int) -> None:
    cases = small_cases(n, every_size=True)
    assert run_threads(lambda world: check(world, cases), n) == [len(cases)] * n


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_large_buffers_go_in_many_messages(collective: str, algorithm: str) -> None:
    n = 2 + NAMES.index((collective, algorithm)) % 3
    case = Case.of((collective, algorithm), n, parts_of(collective, n, BIG), torch.float64, root=n - 1)
    run_threads(lambda world: check(world, [case]), n)


@pytest.mark.grid
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_large_buffers_on_any_number_of_ranks(collective: str, n: int) -> None:
    for algorithm in possible(collective):
        for dtype in (torch.float64, torch.int64):
            case = Case.of((collective, algorithm), n, parts_of(collective, n, BIG), dtype, root=n // 2)
            run_threads(lambda world, case=case: check(world, [case]), n)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.data())
def test_parts_may_have_any_size(names: tuple[str, str], n: int, data: st.DataObject) -> None:
    count = len(parts_of(names[0], n, 0))
    parts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 20]), min_size=count, max_size=count))
    case = Case.of(names, n, parts, data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, n - 1)))
    run_threads(lambda world: check(world, [case]), n)


def made_and_checked(world: World, carrier: str, asked: Sequence[tuple]) -> int:
    """Cases are made where they run: their data need not travel."""
    n = world.size
    assert world.transport.name == "shm"
    if carrier == "gloo":
        world = replace(world, transport=Messages(GlooMail(), world.rank))
    return check(world, [Case.of(names, n, parts_of(names[0], n, size), dtype, root) for names, size, dtype, root in asked])


@pytest.mark.parametrize("carrier", ("gloo", "shm"))
@pytest.mark.parametrize("n", (2, 3, 4))
def test_between_processes_too(n: int, carrier: str, pool) -> None:
    asked = []
    for k, names in enumerate(NAMES):
        size = BIG if k % 12 == n else (1000, n - 1, 1, n, 0)[(k + n) % 5]
        asked.append((names, size, DTYPES[(k + n) % len(DTYPES)], k % n))
    assert pool.run(made_and_checked, ranks=n, args=(carrier, asked), timeout=120) == [len(asked)] * n


@pytest.mark.grid
@pytest.mark.parametrize("carrier", ("gloo", "shm"))
@pytest.mark.parametrize("n", (2, 3, 4))
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_any_size_between_processes(collective: str, algorithm: str, n: int, carrier: str, pool) -> None:
    asked = [((collective, algorithm), size, dtype, n // 2) for size in (0, 1, n - 1, n, BIG) for dtype in (torch.float64, torch.int64)]
    pool.run(made_and_checked, ranks=n, args=(carrier, asked), timeout=120)


@pytest.mark.grid
def test_any_size_on_five_to_eight_processes() -> None:
    with Pool(8) as ranks:
        for n in range(5, 9):
            for k, names in enumerate(NAMES):
                asked = [(names, size, DTYPES[k % 2], k % n) for size in (0, 1, n - 1, n, BIG)]
                assert ranks.run(made_and_checked, ranks=n, args=("gloo", asked), timeout=240) == [len(asked)] * n


def in_shared_memory(rank: int, ranks: int, store: Store) -> SharedMemory:
    return SharedMemory(Machine.meet(rank, ranks, store), timeout=30.0)


@pytest.mark.parametrize("n", (1, 3, 6))
def test_through_shared_memory_too(n: int) -> None:
    cases = small_cases(n, every_size=False)
    assert run_threads(lambda world: check(world, cases), n, transport=in_shared_memory) == [len(cases)] * n


@pytest.mark.grid
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_size_through_shared_memory(collective: str, n: int) -> None:
    cases = [case for case in small_cases(n, every_size=True) if case.collective == collective]
    for algorithm in possible(collective):
        cases += [Case.of((collective, algorithm), n, parts_of(collective, n, BIG), dtype) for dtype in (torch.float64, torch.int64)]
    run_threads(lambda world: check(world, cases), n, transport=in_shared_memory)


@pytest.mark.parametrize("algorithm", possible("all_reduce"))
def test_by_hops_is_what_the_transport_gives(algorithm: str) -> None:
    def rank(world: World) -> None:
        group = Group(world, Mesh.of(dp=world.size), ("dp",), Ledger())
        x = torch.randint(-(2**40), 2**40, (1001,), generator=torch.Generator().manual_seed(world.rank)).double()
        for op in ("avg", "max", "min", "sum"):
            native, hops = x.clone(), x.clone()
            group.all_reduce(native, reason="test", op=op).wait()
            group.all_reduce(hops, reason="test", op=op, algorithm=algorithm).wait()
            assert torch.equal(native, hops)
        bounds, parts = [0, 300, 300, 900, 1001], [torch.zeros(300), torch.zeros(0), torch.zeros(600), torch.zeros(101)]
        if algorithm in possible("reduce_scatter"):
            for accumulate_ in (False, True):
                into = [parts[world.rank].double() + 1 for _ in range(2)]
                group.reduce_scatter(x, bounds, reason="test", into=into[0], accumulate=accumulate_).wait()
                group.reduce_scatter(x, bounds, reason="test", into=into[1], accumulate=accumulate_, algorithm=algorithm).wait()
                assert torch.equal(*into)
            own = slice(bounds[world.rank], bounds[world.rank + 1])
            group.reduce_scatter(hops.copy_(x), bounds, reason="test", into=hops[own], algorithm=algorithm).wait()  # where it was
            group.all_gather(hops, bounds, reason="test", algorithm=algorithm).wait()
            assert torch.equal(native, hops)

    run_threads(rank, 4)


@dataclass
class Jitter(Office):
    """Every message takes a time of its own."""

    chance: random.Random = field(default_factory=random.Random)

    def put(self, key: tuple[int, int, int], x: Tensor) -> None:
        self.delay = self.chance.random() * 2e-3
        super().put(key, x)


@pytest.mark.parametrize("algorithm", possible("all_reduce"))
def test_the_bits_of_a_sum_are_the_same_on_every_rank_and_in_every_run(algorithm: str) -> None:
    def rank(world: World) -> Tensor:
        group = Group(world, Mesh.of(dp=world.size), ("dp",), Ledger())
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(1003, generator=generator) * 10.0 ** torch.randint(-3, 3, (1003,), generator=generator)
        group.all_reduce(x, reason="test", algorithm=algorithm).wait()
        return x

    first = run_threads(rank, 5)
    again = run_threads(rank, 5, office=Jitter(chance=random.Random(0)))
    assert all(torch.equal(first[0], x) for x in [*first, *again])


def test_a_barrier_lets_nobody_through_before_the_last_has_come() -> None:
    for algorithm in possible("barrier"):
        come: list[int] = []

        def rank(world: World, algorithm: str = algorithm, come: list[int] = come) -> int:
            group = Group(world, Mesh.of(dp=world.size), ("dp",), Ledger())
            if world.rank == 3:
                time.sleep(0.02)
            come.append(world.rank)
            group.barrier(reason="test", algorithm=algorithm).wait()
            return len(come)

        assert run_threads(rank, 5) == [5] * 5


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 1000))
def test_a_program_of_one_s_own_runs_as_it_is_written(n: int, shifts: list[int], seed: int) -> None:
    """Every rank sends its only chunk on and is sent another in the same round: what is sent is what was there before it."""
    hops = [Hop(k, rank, (rank + shift) % n, 0, True) for k, shift in enumerate(shifts) for rank in range(n) if shift % n]
    numbers = {number: new for new, number in enumerate(sorted({hop.round for hop in hops}))}
    own = Program("all_reduce", "shifts", n, 1, tuple(hop._replace(round=numbers[hop.round]) for hop in hops))
    values = [seed + 10**rank for rank in range(n)]
    for shift in shifts:
        values = [values[rank] + values[(rank - shift) % n] if shift % n else values[rank] for rank in range(n)]

    def rank(world: World) -> list[int]:
        group = Group(world, Mesh.of(dp=n), ("dp",), Ledger())
        x = torch.full((CHUNK + 5,), seed + 10**world.rank)
        group.all_reduce(x, reason="test", algorithm=own).wait()
        return x.unique().tolist()

    assert run_threads(rank, n) == [[value] for value in values]


@given(st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]), max_size=6))
def test_a_message_is_one_if_small_and_never_packed_if_large(sizes: list[int]) -> None:
    found = pieces(range(len(sizes)), sizes)
    covered = [element for spans in found for chunk, start, stop in spans for element in ((chunk, start), (chunk, stop))]
    assert covered[::2] == [(c, start) for c, size in enumerate(sizes) for start in range(0, size, CHUNK)]
    assert sum(span.stop - span.start for spans in found for span in spans) == sum(sizes)
    assert all(sum(span.stop - span.start for span in spans) <= CHUNK for spans in found)
    assert all(len(spans) == 1 for spans in found) or len(found) == 1


def test_each_rank_sends_the_bytes_that_the_program_says() -> None:
    for algorithm in possible("all_reduce"):
        office = Office()

        def rank(world: World, algorithm: str = algorithm) -> None:
            group = Group(world, Mesh.of(dp=world.size), ("dp",), Ledger())
            group.all_reduce(torch.zeros(960, dtype=torch.float64), reason="test", algorithm=algorithm).wait()

        run_threads(rank, 6, office=office)
        said = traffic(program("all_reduce", algorithm, 6), 960 * 8)
        assert [office.bytes_sent[rank] for rank in range(6)] == pytest.approx([one.sent for one in said])
        assert office.messages == sum(one.messages for one in said)


def test_the_ledger_says_the_collective_not_its_hops() -> None:
    ledger = Ledger()
    group = Group(World.alone("cpu"), Mesh.of(), ("dp",), ledger)
    x, into = torch.arange(3.0), torch.zeros(3)
    group.all_reduce(x, reason="a", algorithm="ring").wait()
    group.reduce(x, 0, reason="b").wait()
    group.gather(x, (0, 3), 0, reason="c").wait()
    group.scatter(x, (0, 3), 0, reason="d", into=into).wait()
    group.all_to_all(x, [[3]], reason="e", into=into).wait()
    group.barrier(reason="f").wait()
    assert x.tolist() == into.tolist() == [0, 1, 2]
    said = [(entry.collective, entry.elements, entry.reason) for entry, _ in ledger]
    assert said == [
        ("all_reduce", 3, "a"), ("reduce", 3, "b"), ("gather", 3, "c"), ("scatter", 3, "d"), ("all_to_all", 3, "e"), ("barrier", 1, "f")
    ]  # fmt: skip


def test_what_cannot_be_run_is_refused() -> None:
    group = Group(World.alone("cpu"), Mesh.of(), ("dp",), Ledger())
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="op=mean: use one of sum, avg, max, min"):
        group.all_reduce(x, reason="test", op="mean", algorithm="ring")
    with pytest.raises(JobError, match="there is no algorithm 'rings'"):
        group.all_reduce(x, reason="test", algorithm="rings")
    with pytest.raises(JobError, match=r"ring all_reduce over 2 ranks \(root 0\) is not all_reduce over the 1 ranks"):
        group.all_reduce(x, reason="test", algorithm=program("all_reduce", "ring", 2))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_rank_that_never_comes_is_lost_to_those_who_wait_for_it(algorithm: str) -> None:
    def rank(world: World) -> None:
        if world.rank != 1:
            Group(world, Mesh.of(dp=3), ("dp",), Ledger()).all_reduce(torch.zeros(9), reason="test", algorithm=algorithm)

    with pytest.raises(PeerLost, match=r"rank \d sent nothing"):
        run_threads(rank, 3, office=Office(patience=0.3))
