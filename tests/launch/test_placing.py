import pytest

from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.placing import placing
from stretto.launch.training import elsewhere


def place(mesh, nodes=None, **keys):
    return placing(elsewhere(Job.load("tiny", mesh=mesh, **{"batch.size": 16, **keys})), nodes)


def test_ranks_are_shared_evenly_and_tp_neighbours_stay_together_where_they_can():
    assert place("dp=4 tp=2", 2)[:2] == (2, 8) and place("dp=4 tp=2", 2).per_node == 4
    assert place("dp=4").nodes == 1 and place("dp=4").per_node == 4
    assert [place("dp=2 tp=4", nodes).tp_inside for nodes in (1, 2, 4, 8)] == [True, True, False, False]
    assert place("dp=64", 8, device="cuda", **{"batch.size": 64}).gpus and not place("dp=2", device="cpu").gpus


def test_ranks_that_cannot_be_shared_are_refused_with_what_can():
    with pytest.raises(JobError, match=r'--nodes 3: the 4 ranks of mesh="dp=4" cannot.*\{1, 2, 4\}'):
        place("dp=4", 3)
    with pytest.raises(JobError, match="--nodes 0"):
        place("dp=4", 0)
