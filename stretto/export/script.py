"""The part that exported training scripts share: the job's model, first values, batches, learning rate and loss.

Frameworks that wrap any module have no configuration of models and data. So what stretto writes for them comes with a script that takes
these from stretto, and everything that the framework does from the framework: read it as an example, and put your own model in.
"""

from __future__ import annotations

from string import Template

from stretto.export.reading import Reading

HEAD = Template('''\
"""Trains the job in job.toml with $framework: the same model, first values, batches and learning rate. Written by `stretto export`.

    $run
"""
$imports
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.data.batch import count_targets, prepare_labels
from stretto.data.feed import Feed
from stretto.data.source import open_source
from stretto.engine.loss import call_model, next_token_loss
from stretto.engine.optimizer import lr_factor
from stretto.engine.values import whole
from stretto.job import Job
from stretto.models import library
from stretto.parallel import recompute
from stretto.parallel.units import block_list

HERE = Path(__file__).parent
job = Job.load(HERE / "job.toml")
loaded = library.load(job.model.name, weights=job.model.weights, seed=job.seed, overrides=job.model.sizes())
torch.manual_seed(job.seed)


def first_model():
    """The whole model with the values that stretto starts from; its blocks recompute and are compiled as the job says."""
    model = whole(loaded, job.seed)
    blocks, compiled = block_list(model)[1], job.compile.mode == "block"
    recompute.apply(blocks, job.recompute, True, compiled=compiled)
    for block in blocks if compiled else ():
        block.compile(backend=job.compile.backend)
    return model


def feed():
    """Rows of a step by its number."""
    seed = job.seed if job.data.seed is None else job.data.seed
    data, length = job.data, job.batch.seq_len
    source = open_source(
        data.source, seq_len=length, vocab=loaded.vocab, split=data.split, column=data.column, tokenizer=data.tokenizer, seed=seed
    )
    return Feed(source, size=job.batch.size, seed=seed, epochs=job.epochs)


def rows_of(step, rank, shards, device):
    """This rank's microbatches of a step, and the number of targets that count in the whole step: what its loss is divided by."""
    whole = prepare_labels(data.rows(step))
    return whole.part(shards, rank).to(device).microbatches(job.microbatches), count_targets(whole)


def loss_of(model, rows):
    """The sum of losses of a microbatch."""
    return next_token_loss((loaded.forward or call_model)(model, rows), rows)[0]


def groups(model):
    """Parameters of two or more dims, which decay, and the others."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": job.optimizer.weight_decay}
    return [g for g in (decayed, {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}) if g["params"]]


data = feed()
steps = job.total_steps() or data.steps
factor = partial(lr_factor, job.schedule, total=job.schedule.steps or steps)


def scheduler(optimizer):
    """The job's learning rate, update by update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: factor(update=update))


def tell(step, total):
    """Print a step's loss, from each rank's share of it."""
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step + 1}  loss {total.item():.6f}", flush=True)
''')


#: Keys that the script takes from job.toml, so that the configuration need not say them.
TAKEN = (
    "seed", "batch.seq_len", "recompute", "compile.mode", "compile.backend", "data.source", "data.split", "data.column", "data.tokenizer",
    "data.seed", "schedule.steps", "schedule.warmup",
)  # fmt: skip


def take(asked: Reading) -> None:
    """Note what the script does by itself, and what a training loop would have to do that it does not."""
    for key in TAKEN:
        asked(key)
    asked.answered_by_model()
    for key in ("checkpoint.every", "eval.every"):
        asked.lacks_if(key, 0, "is a call in the training loop, and no key; train.py does not make it")


def script(framework: str, run: str, imports: str, body: str) -> str:
    """The text of a script: the shared head, then what is the framework's own. imports: its import lines of the standard library."""
    return HEAD.substitute(framework=framework, run=run, imports=imports) + body
