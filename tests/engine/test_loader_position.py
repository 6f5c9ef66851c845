"""Where the loaders of an engine stand is kept by it, and holds on any number of ranks."""

from __future__ import annotations

import copy

import torch
from truth import apart, small, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.job import Job

SAMPLES = tokens(1, 17)[0]


class Rows:
    """Sample i is row i of SAMPLES, and says so."""

    def __len__(self):
        return 17

    def __getitem__(self, i):
        return {name: values[i] for name, values in SAMPLES.items()} | {"number": i}


def run(ranks, model, positions, steps):
    """(samples of each step in rank order, parameters, positions) of `steps` steps from `positions`, through two loaders in turn."""
    job = Job.load(mesh=f"dp={ranks}", precision="fp64", schedule="constant", seed=3, optimizer={"name": "sgd", "lr": 0.1}, batch=6)

    def rank(world):
        forward = lambda model, batch: model(batch["input_ids"])
        with Engine(copy.deepcopy(model), job, world, forward=forward) as engine:
            loaders = [engine.loader(Rows()), engine.loader(Rows())]
            assert engine.loaders == loaders
            for loader, position in zip(engine.loaders, positions):
                loader.load_state({"position": position})
            seen = []
            for step in range(steps):
                batch = next(iter(loaders[step % 2]))
                assert batch.local
                engine.step(batch)
                seen.append(batch["number"].tolist())
        return seen, dict(engine.full_state()), [loader.state()["position"] for loader in engine.loaders]

    results = run_threads(rank, ranks)
    joined = [[i for part in parts for i in part] for parts in zip(*(seen for seen, *_ in results))]
    return joined, results[0][1], results[0][2]


def test_a_run_that_goes_on_where_its_loaders_stood_is_the_run_of_one_process():
    before, state, positions = run(2, small(), [0, 0], 5)
    assert positions == [17, 12]
    assert sorted(before[0] + before[2] + before[4]) == list(range(17))  # the first loader's whole epoch, its last batch of five
    model = small().double()
    model.load_state_dict(state)
    after, state, positions = run(3, model, positions, 2)
    assert positions == [17 + 6, 17]
    assert sorted(before[1] + before[3] + after[1]) == list(range(17))  # the second one's, ended on three ranks
    seen = [{name: values[batch] for name, values in SAMPLES.items()} for batch in before + after]
    _, parameters = train(small(), seen, lr=0.1, make=lambda groups: torch.optim.SGD(groups, lr=0.1))
    assert apart(state, parameters) <= 1e-10
