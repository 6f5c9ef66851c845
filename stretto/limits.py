"""What fits together: sizes of a model, a batch and a mesh. Each check returns, or raises the JobError that says what would fit."""

from __future__ import annotations

import json
from pathlib import Path

from stretto.anatomy import DECODERS, DecoderShape
from stretto.errors import JobError
from stretto.keys import show
from stretto.layout.mesh import Mesh
from stretto.sections import DTYPE_BYTES, Batch, Checkpoint, Model, Precision, Profile

#: Axes a Job may already name but no engine runs yet.
LATER = ("cp", "ep")


def check_model(model: Model, seq_len: int) -> None:
    """The shape asked for is one that can be built, and holds rows of seq_len tokens."""
    if model.name not in DECODERS:
        for key, value in model.sizes().items():
            known = ", ".join(DECODERS)
            raise JobError(
                f"model.{key}={show(value)}: the shape of {model.name} is its own; leave it out, or write a built-in model ({known})"
            )
        return
    if model.weights == "pretrained":
        raise JobError(f'model.weights="pretrained": {model.name} is built in and has no weights to load; write model.weights="random"')
    shape = _shape(model)
    if shape.position == "learned" and seq_len > shape.positions:
        raise JobError(
            f"batch.seq_len={seq_len} is longer than the {shape.positions} learned positions of {model.name}; "
            f"write batch.seq_len={shape.positions} or less, or model.positions={seq_len}"
        )


def check_precision(precision: Precision) -> None:
    """The optimizer's copy of the weights holds at least what compute does."""
    compute, master = precision.compute, precision.master
    if compute and master and DTYPE_BYTES[master] < DTYPE_BYTES[compute]:
        raise JobError(
            f'precision.master="{master}" is narrower than precision.compute="{compute}", so weights would lose digits each step; '
            f'write precision.master="{compute}", or leave it out'
        )


def check_checkpoint(checkpoint: Checkpoint, eval_every: int) -> None:
    """What is to be kept is saved at all."""
    every, keep_every = checkpoint.every, checkpoint.keep_every
    if checkpoint.best and not eval_every:
        raise JobError("checkpoint.best=true needs an evaluation to tell which is the best; write eval.every=50 and data.split=0.05")
    if keep_every and (not every or keep_every % every):
        fits = f"checkpoint.keep_every={-(-keep_every // every) * every}" if every else f"checkpoint.every={keep_every}"
        raise JobError(f"checkpoint.keep_every={keep_every}: none is saved at such steps (checkpoint.every={every}); write {fits}")


def check_mesh(mesh: Mesh, model: Model | None, batch_size: int, ranks: int | None) -> None:
    """Only axes that this version runs are longer than 1, and tp cuts the model between its heads. model: None where it is the
    caller's own. ranks: how many were started, None if the mesh says."""
    asked = [axis for axis in LATER if mesh[axis] > 1]
    shape = _shape(model) if model and model.name in DECODERS else None
    if asked:
        why = ""
        if model and shape and mesh["pp"] > shape.blocks:
            why = f"pp={mesh['pp']} is more than the {shape.blocks} blocks of {model.name}, and "
        plural = "is" if len(asked) == 1 else "are"
        instead = ranks or _divisor_below(batch_size, mesh.size + 1)
        raise JobError(f'mesh="{mesh}": {why}{" and ".join(asked)} {plural} not in this version yet; write mesh="dp={instead}"')
    if model and mesh["tp"] > 1:
        heads = (shape.heads, shape.kv_heads) if shape else _heads_of_folder(model.name)
        if heads:
            check_heads(model.name, *heads, mesh["tp"])


def check_heads(name: str, heads: int, kv_heads: int, tp: int) -> None:
    """tp cuts queries between heads; keys and values too, or each of their heads is shared by as many ranks. Other sizes may be cut
    unevenly."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(tp):
        what = f"heads={heads} of {name}" if heads % tp else f"kv_heads={kv_heads} of {name}, nor they it"
        possible = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise JobError(f"mesh.tp={tp} does not divide {what}; use tp in {{{possible}}}")


def check_rows(batch: Batch, mesh: Mesh) -> None:
    """The rows of a step are shared evenly by the dp ranks, and a microbatch is no more than a rank has."""
    shards = mesh.extent("dp", "dp_replicate")
    if batch.size % shards:
        axes = " ".join(f"{axis}={mesh[axis]}" for axis in ("dp_replicate", "dp") if mesh[axis] > 1)
        above = next((n for n in range(shards + 1, 4 * shards) if batch.size % n == 0), None)
        meshes = " or ".join(f'"dp={n}"' for n in (_divisor_below(batch.size, shards), above) if n)
        raise JobError(
            f"batch.size={batch.size} cannot be shared evenly by {axes}; write batch.size={_around(batch.size, shards)}, or mesh={meshes}"
        )
    rows = batch.size // shards
    if batch.micro_size and batch.micro_size > rows:
        raise JobError(
            f"batch.micro_size={batch.micro_size} is more than the {rows} rows of a rank (batch.size={batch.size} over {shards} dp ranks); "
            f"write batch.micro_size={rows} or less, or leave it out"
        )


def check_profile(profile: Profile, mesh: Mesh, steps: int | None) -> None:
    """The steps to time are steps of the job (numbered from 1; `steps` in all, None: not known yet), on ranks that there are."""
    outside = [step for step in profile.steps if step < 1 or (steps is not None and step > steps)]
    if outside:
        last = "" if steps is None else f" to {steps}"
        raise JobError(f"profile.steps={show(profile.steps)}: steps are numbered from 1{last}; write profile.steps={show((steps or 1,))}")
    if profile.steps and max(profile.ranks, default=0) >= mesh.size:
        top = mesh.size - 1
        raise JobError(f'profile.ranks={show(profile.ranks)}: mesh="{mesh}" has ranks 0 to {top}; write profile.ranks={show((top,))}')


def _shape(model: Model) -> DecoderShape:
    return DECODERS[model.name].with_(model.sizes())


def blocks_of_folder(name: str) -> int | None:
    """Blocks of the transformers model in a folder, by its config.json; None where that does not say, or is not there."""
    return _number_of_folder(name, "num_hidden_layers", "n_layer", "num_layers")


def _heads_of_folder(name: str) -> tuple[int, int] | None:
    """Heads and kv heads of the transformers model in a folder."""
    heads = _number_of_folder(name, "num_attention_heads", "n_head")
    kv_heads = _number_of_folder(name, "num_key_value_heads") or heads
    return (heads, kv_heads) if heads and kv_heads else None


def _number_of_folder(name: str, *keys: str) -> int | None:
    path = Path(name.removeprefix("hf:")) / "config.json"
    if not name.startswith("hf:") or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        return next((value for key in keys if isinstance(value := config.get(key), int)), None)
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads it says what is wrong with it


def _divisor_below(n: int, limit: int) -> int:
    """The largest number below `limit` that divides n (looked for among the first 65536: a mesh is no longer)."""
    return next(k for k in range(min(n, limit - 1, 65536), 0, -1) if n % k == 0)


def _around(n: int, step: int) -> str:
    """The multiples of `step` next to n, as '4 or 8'."""
    below = n // step * step
    return " or ".join(str(m) for m in (below, below + step) if m)
