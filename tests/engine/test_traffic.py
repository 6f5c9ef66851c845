"""What a step sends and what a rank holds: the table's own count, call for call and byte for byte."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace

import pytest
import torch
from truth import small, tokens

from stretto.comm.messages import Messages
from stretto.comm.threads import Office, run_threads
from stretto.comm.transport import GlooMail
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.layout.zero import ZeroPolicy, calls, held_elements
from stretto.models import library

CHOICES = [
    (0, "end", "microbatch"),
    (1, "end", "microbatch"),
    (2, "each", "microbatch"),
    (2, "end", "microbatch"),
    (3, "each", "microbatch"),
    (3, "end", "microbatch"),
    (3, "each", "step"),
    (3, "end", "step"),
]


def job(mesh: str, stage: int, gradients: str, params: str, **keys) -> Job:
    usual = {"batch.size": 12, "batch.seq_len": 6, "schedule": "constant", "zero.gradients": gradients, "zero.params": params}
    return Job.load({**usual, "mesh": mesh, "zero.stage": stage}, **keys)


def foretold(engine: Engine, microbatches: int) -> dict[tuple[str, int, str, str], int]:
    """(collective, elements, dtype, reason) -> times, as the ZERO table says for this engine's groups."""
    keys = engine.job.zero
    policy = ZeroPolicy.of(keys.stage, keys.gradients, keys.params)
    facts = tuple(group.facts for group in engine.parallel.groups)
    found: dict[tuple[str, int, str, str], int] = {}
    for call in calls(policy, facts, microbatches, engine.mesh["dp_replicate"], engine.mesh.extent("dp", "cp")):
        dtype = engine.precision.compute if call.what == "param" else engine.precision.reduce
        key = (call.collective, call.elements, str(dtype).removeprefix("torch."), call.reason)
        found[key] = found.get(key, 0) + 1
    return found


def written(report) -> dict[tuple[str, int, str, str], int]:
    rest = {"vote", "roll call"}  # the step's own two small sums
    return {(e.collective, e.elements, e.dtype, e.reason): times for e, times in report.ledger if e.reason not in rest}


MESHES = (("dp=1", 1), ("dp=3", 3), ("dp_replicate=2 dp=2", 4))
MICROS = ((None, False, "fp32"), (1, True, "bf16"), (2, False, "bf16"))
#: Each choice with each mesh and with each way to cut rows, and each of these with one another; the rest of them is in the grid.
LEDGERS = [
    pytest.param(choice, *mesh, *micro, marks=() if (i + j + k) % 3 == 0 else pytest.mark.grid)
    for i, choice in enumerate(CHOICES)
    for j, mesh in enumerate(MESHES)
    for k, micro in enumerate(MICROS)
]


@pytest.mark.parametrize(("choice", "mesh", "ranks", "micro", "tied", "precision"), LEDGERS)
def test_the_ledger_of_a_step_is_what_the_table_foretells_call_for_call(choice, mesh, ranks, micro, tied, precision):
    model = small(tied=tied)
    for p in model.layers[1].parameters():
        p.requires_grad_(False)
    asked = job(mesh, *choice, precision=precision, **{"batch.micro_size": micro})

    def rank(world):
        engine = Engine(copy.deepcopy(model), asked, world, regular=("embed", "norm", "head"))
        reports = [engine.step(batch) for batch in tokens(2, 12)]
        return [written(r) for r in reports], foretold(engine, engine.job.microbatches), [len(r.ledger) for r in reports]

    for reports, expected, lengths in run_threads(rank, ranks):
        assert reports == [expected] * 2
        assert lengths == [sum(expected.values()) + 1] * 2  # and one vote


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_what_the_formulas_of_zero_say(stage, microbatches):
    """REFERENCE B9, for a decoder all of whose modules run once: elements, times (n-1)/n."""

    def rank(world):
        asked = job("dp=4", stage, "each" if stage > 1 else "end", "microbatch", **{"batch.micro_size": 3 // microbatches})
        engine = Engine(library.load("tiny", overrides={"blocks": 2, "hidden": 32, "heads": 4}), asked, world)
        engine.step(tokens(1, 12)[0])
        report = engine.step(tokens(1, 12)[0])
        return sum(g.plan.total for g in engine.parallel.groups), report.ledger

    m = microbatches
    passes = {0: 2, 1: 2, 2: m + 1, 3: 3 * m}[stage]
    for psi, ledger in run_threads(rank, 4):
        vote = 2 * 5 * 8 * 3 // 4
        assert ledger.bytes_sent(Mesh.of(dp=4)) - vote == pytest.approx(passes * psi * 4 * 3 // 4, abs=1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_messages_carry_exactly_the_bytes_of_the_ledger(stage):
    office = Office()
    before = {}

    def rank(world):
        asked = job("dp=3", stage, "each" if stage > 1 else "end", "microbatch", precision="bf16")
        engine = Engine(small(width=64), asked, world)
        engine.everybody.objects(0, reason="meet")
        before[world.rank] = office.bytes_sent[world.rank]
        return engine.step(tokens(1, 12)[0]).ledger

    ledgers = run_threads(rank, 3, office=office)
    for rank_, ledger in enumerate(ledgers):
        small_sum = sum(
            2 * e.elements * 8 - round(2 * e.elements * 8 * 2 / 3) for e, _ in ledger if e.reason == "vote"
        )  # sent whole, to 2 peers
        sent, told = office.bytes_sent[rank_] - before[rank_], ledger.bytes_sent(Mesh.of(dp=3))
        assert sent == pytest.approx(told + small_sum, rel=1e-3)  # slices of a buffer that n does not divide differ by an element


def sent_by_sockets() -> int:
    """Payload bytes of this process that have arrived over its TCP connections, as the kernel counts them: tcp_info's tcpi_bytes_acked,
    which knows nothing of packets sent twice, once the send queues are empty."""
    import fcntl
    import os
    import socket
    import struct
    import termios
    import time

    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    for _ in range(5000):
                        if not struct.unpack("<i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
                            break
                        time.sleep(0.001)
                    total += struct.unpack_from("<Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232), 120)[0]
        except (OSError, struct.error):
            continue  # no socket, or one that only listens
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the bytes of a connection")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gloos_connections_carry_what_the_ledger_says(pool, stage):
    """By the kernel's own count, over loopback; gloo adds a header of some dozen bytes to each message of up to a megabyte."""

    def rank(world):
        world = replace(world, transport=Messages(GlooMail(), world.rank))
        engine = Engine(library.load("tiny"), job("dp=2", stage, "each" if stage > 1 else "end", "microbatch"), world)
        engine.step(tokens(1, 12)[0])
        before = sent_by_sockets()
        told = sum(engine.step(tokens(1, 12)[0]).ledger.bytes_sent(engine.mesh) for _ in range(3))
        return sent_by_sockets() - before, told

    for carried, told in pool.run(rank, ranks=2):
        assert told <= carried <= 1.01 * told


@pytest.mark.parametrize(("precision", "param", "grad", "master"), [("fp32", 4, 4, 0), ("bf16", 2, 4, 4), ("fp64", 8, 8, 0)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_the_bytes_that_its_stage_promises(stage, ranks, precision, param, grad, master):
    """REFERENCE B1, counted from live storages: parameters, gradients, and master copy with two moments."""
    moment = 8 if precision == "fp64" else 4

    def rank(world):
        asked = job(f"dp={ranks}", stage, "each" if stage > 1 else "end", "microbatch", precision=precision)
        engine = Engine(library.load("tiny", overrides={"blocks": 2, "hidden": 64}), asked, world)
        engine.step(tokens(1, 12)[0])
        return engine.bytes_held(), sum(p.numel() for p in engine.model.parameters()), [g.plan.total for g in engine.parallel.groups]

    held_by, counts, totals = zip(*run_threads(rank, ranks))
    psi = counts[0]
    assert sum(totals[0]) <= 1.005 * psi  # padding
    policy = ZeroPolicy.of(stage)
    elements = {kind: sum(held_elements(policy, total, ranks)[kind] for total in totals[0]) for kind in ("param", "grad", "optim")}
    for held in held_by:
        assert held["parameters"] == param * elements["param"]
        assert held["gradients"] == grad * elements["grad"]
    # padding has a master but no moments, so the ranks together hold exactly the formula
    copies = 1 if stage == 0 else ranks
    assert sum(held["optimizer"] for held in held_by) * copies // ranks == master * elements["optim"] * copies + 2 * moment * psi
    shards = {"parameters": 3, "gradients": 2, "optimizer": 1}
    per_psi = {"parameters": param, "gradients": grad, "optimizer": master + 2 * moment}
    for kind, first in shards.items():
        formula = per_psi[kind] * psi / (ranks if stage >= first else 1)
        assert max(held[kind] for held in held_by) == pytest.approx(formula, rel=0.005)


def test_reduction_runs_beside_backward():
    """With a transport that delays every message by D, a step grows by less than 0.3 n D; one after the other would cost n D."""
    delay = 0.04

    def seconds(pause: float, stage: int) -> tuple[float, int]:
        office = Office(delay=pause)

        def rank(world):
            engine = Engine(small(blocks=10), job("dp=2", stage, "end", "microbatch"), world)
            batches = tokens(5, 12)
            engine.step(batches[0])
            times = []
            for batch in batches[1:]:
                start = time.perf_counter()
                report = engine.step(batch)
                times.append(time.perf_counter() - start)
            return min(times), len(report.ledger)  # of a step that nothing else on the machine disturbed

        return run_threads(rank, 2, office=office)[0]

    for stage in (0, 1):
        quick, collectives = seconds(0.0, stage)
        slow, _ = seconds(delay, stage)
        assert collectives > 10
        assert slow - quick < 0.3 * collectives * delay


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_delays_and_their_order_do_not_change_a_bit(stage):  # PAINS 9
    def final(delay):
        def rank(world):
            engine = Engine(small(), job("dp=3", stage, "each" if stage > 1 else "end", "microbatch", **{"batch.micro_size": 2}), world)
            for batch in tokens(2, 12):
                engine.step(batch)
            return dict(engine.full_state())

        return run_threads(rank, 3, delay=delay)[0]

    one, two = final(0.0), final(0.002)
    assert all(torch.equal(one[name], two[name]) for name in one)
