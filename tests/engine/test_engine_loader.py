"""engine.loader: a dataset of one's own, each rank its rows, an epoch as one process would see it; ranks without any row."""

from __future__ import annotations

import copy

import pytest
from truth import apart, small, token_loss, tokens, train

from stretto.comm.threads import run_threads
from stretto.data.order import samples_at
from stretto.engine.engine import Engine
from stretto.job import Job

SAMPLES = tokens(1, 7)[0]


class Rows:
    """Sample i is row i of SAMPLES."""

    def __len__(self) -> int:
        return len(SAMPLES["input_ids"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in SAMPLES.items()}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_of_a_dataset_on_any_number_of_ranks_gives_the_steps_of_one_process(ranks, zero):
    asked = {"mesh": f"dp={ranks}", "zero": zero, "batch.size": 6 if ranks == 3 else 2, "batch.seq_len": 6, "precision": "fp64"}
    job = Job.load({**asked, "optimizer.lr": 1e-2, "schedule": "constant", "data.seed": 3})

    def rank(world):
        with Engine(copy.deepcopy(small()), job, world) as engine:
            loader = engine.loader(Rows())
            reports = [engine.step(batch) for _ in range(2) for batch in loader]
            mean = engine.evaluate(loader)["loss"]
        return [report.samples for report in reports], mean, dict(engine.full_state())

    sizes, mean, state = run_threads(rank, ranks)[0]
    size = job.batch.size
    spans = [range(start, min(start + size, end)) for end in (7, 14) for start in range(end - 7, end, size)]
    seen = [{name: values[samples_at(3, span, 7)] for name, values in SAMPLES.items()} for span in spans]
    _, parameters = train(small(), seen)
    assert sizes == [len(span) for span in spans]
    assert apart(state, parameters) <= 1e-10
    model = copy.deepcopy(small()).double()
    model.load_state_dict(parameters)
    total, count = token_loss(model, SAMPLES)
    assert mean == pytest.approx(float(total.detach()) / count, rel=1e-10)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_rank_without_rows_updates_by_the_same_gradient(zero, local, own):
    batch = {name: values[:2] for name, values in SAMPLES.items()}
    keys = {"loss": lambda logits, b: token_loss(lambda ids: logits, b)} if own else {}

    def rank(world):
        asked = {"mesh": "dp=3", "zero": zero, "batch.size": 6, "batch.seq_len": 6, "precision": "fp64", "optimizer.lr": 1e-2}
        mine = {name: values[world.rank : world.rank + 1] for name, values in batch.items()} if world.rank < 2 else None
        with Engine(copy.deepcopy(small()), Job.load({**asked, "schedule": "constant"}), world, **keys) as engine:
            report = engine.step(mine, local=True) if local else engine.step(batch)
        return report.grad_norm, dict(engine.full_state())

    truth, parameters = train(small(), [batch])
    results = run_threads(rank, 3)
    assert [norm for norm, _ in results] == pytest.approx([truth[0][1]] * 3, rel=1e-10)
    assert apart(results[0][1], parameters) <= 1e-10
