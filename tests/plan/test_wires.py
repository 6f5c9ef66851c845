"""What a device sends in a step, against the closed forms of the collectives."""

from __future__ import annotations

import pytest

from stretto.job import Job
from stretto.plan.asking import ask
from stretto.plan.hardware import Cluster
from stretto.plan.view import view
from stretto.plan.wires import Wire

JOB = Job.load("llama3-8b", compile="block", recompute="none", **{"batch.size": 32, "batch.seq_len": 4096, "batch.micro_size": 1})
P, HIDDEN, BLOCKS, ROW = 8_030_261_248, 4096, 32, 4096 * 4096 * 2  # parameters; bytes of a row's hidden states in bf16


def sent(mesh: str, cluster: str, **keys: object) -> dict[str, Wire]:
    asked = ask(JOB.with_(mesh=mesh, **keys), Cluster.of(cluster), {"mesh"})
    assert asked.anatomy.parameters() == P
    return {wire.words: wire for wire in view(asked).sent}


def test_zero_1_scatters_gradients_and_gathers_parameters_once_a_step() -> None:
    found = sent("dp=8", "1x8 h100", zero=1)
    assert found == {
        "gradients meet": Wire("gradients meet", pytest.approx(4 * P * 7 / 8), 0.0),
        "parameters come back": Wire("parameters come back", pytest.approx(2 * P * 7 / 8), 0.0),
    }


def test_between_machines_each_card_carries_its_share_of_the_ring() -> None:
    found = sent("dp=32", "4x8 h100", zero=0)
    whole = 2 * 4 * P * 31 / 32  # an all-reduce
    assert list(found) == ["gradients meet"]
    assert found["gradients meet"].inside == pytest.approx(whole) and found["gradients meet"].across == pytest.approx(whole / 8)


def test_zero_3_gathers_twice_and_scatters_once_a_microbatch() -> None:
    found = sent("dp=8", "1x8 h100", zero=3)
    assert list(found) == ["parameters and gradients while blocks run"]
    assert found["parameters and gradients while blocks run"].inside == pytest.approx(4 * (2 + 2 + 4) * P * 7 / 8)  # 4 microbatches


def test_tp_crosses_four_times_a_block_there_and_four_times_back() -> None:
    found = sent("tp=8", "1x8 h100", zero=0)
    crossings = 32 * (8 * BLOCKS + 4) * ROW * 7 / 8  # 32 rows; embedding and head cross once each way
    assert list(found) == ["tp crossings"] and found["tp crossings"].inside == pytest.approx(crossings)


@pytest.mark.parametrize(
    ("mesh", "cluster", "keys", "messages", "across"),
    [
        ("pp=2 dp=4", "1x8 h100", {}, 1, False),  # each rank sends one way
        ("pp=4 dp=2", "1x8 h100", {}, 2, False),
        ("pp=4 dp=8", "4x8 h100", {}, 2, True),
        ("pp=4 dp=2", "1x8 h100", {"pipeline": {"schedule": "interleaved", "chunks": 4}}, 8, False),
        ("pp=4 dp=2", "1x8 h100", {"pipeline": "zb-v", "compile": "none"}, 4, False),  # the last holds two neighbours
    ],
)
def test_stages_send_hidden_states_to_those_beside_them(
    mesh: str, cluster: str, keys: dict[str, object], messages: int, across: bool
) -> None:
    replicas = int(mesh.rpartition("=")[2])
    wire = sent(mesh, cluster, **keys)["microbatches to other stages"]
    bytes_ = pytest.approx(32 / replicas * messages * ROW)
    assert wire[1:] == ((0.0, bytes_) if across else (bytes_, 0.0))


def test_a_link_takes_at_least_what_it_reaches() -> None:
    cluster = Cluster.of("2x8 h100")
    assert Wire("", 729e9, 45.5e9).seconds(cluster) == pytest.approx(2.0)  # 450 GB/s x 0.81; 50 GB/s x 0.91 takes 1 s
