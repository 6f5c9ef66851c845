"""The model of an engine as a Hugging Face folder: whole tensors come to rank 0 one at a time, which writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.checkpoint.huggingface import Listed, write_folder
from stretto.checkpoint.parts import DTYPES, NAMES
from stretto.checkpoint.save import told
from stretto.checkpoint.store import Store
from stretto.errors import RunError, StrettoError
from stretto.layout.layout import Shape
from stretto.models.hub import names_in_files
from stretto.models.pretrained import OURS, config_of, name_there

if TYPE_CHECKING:
    from stretto.engine.engine import Engine


def save_pretrained(engine: Engine, store: Store, name: str, dtype: torch.dtype | None = None) -> None:
    """See Engine.save_pretrained. An error of rank 0 is everybody's."""
    config = config_of(engine.model)
    shapes = _in_order_of_full_state(engine)
    if dtype is not None:
        parameters = {kept for content in engine.parallel.contents for kept, _ in content.tensors}
        shapes = {key: (NAMES[dtype] if key in parameters else own, shape) for key, (own, shape) in shapes.items()}
    there = {key: name_there(key, config) for key in shapes} if OURS in config else names_in_files(engine.model, list(shapes))
    listed = [Listed(there[key], dtype, shape) for key, (dtype, shape) in shapes.items()]
    coming = engine.full_state()

    def values() -> Iterator[Tensor]:
        for key, tensor in coming:
            if key in shapes and tensor is not None:  # other names of a tied weight are not written
                yield tensor.to(DTYPES[shapes[key][0]])

    failed: StrettoError | None = None
    if engine.world.rank == 0:
        try:
            write_folder(store, name, config, listed, values())
        except StrettoError as error:
            failed = error
        except OSError as error:
            failed = RunError(told(error, store.path(name), sum(tensor.bytes_ for tensor in listed)))
    for _ in coming:  # all ranks go through to the end
        pass
    failure = engine.everybody.objects(failed, reason="export")[0]
    if failure is not None:
        raise failure


def _in_order_of_full_state(engine: Engine) -> dict[str, tuple[str, Shape]]:
    """Dtype (safetensors' name) and whole shape of every parameter, by its first name, and every persistent buffer. Collective."""
    parallel = engine.parallel
    mine: dict[str, tuple[str, Shape]] = {}
    for group in parallel.groups:
        dtype = NAMES[group.values().dtype]
        mine |= {slot.name: (dtype, tuple(group.places[slot.name].shape)) for slot in group.plan.slots}
    for stage in parallel.stages:
        mine |= {name: (NAMES[buffer.dtype], tuple(buffer.shape)) for name, buffer in stage.model.named_buffers()}
    known = {name: found for rank in engine.everybody.objects(mine, reason="export") for name, found in rank.items()}
    parameters = [name for content in parallel.contents if not content.copied for name, _ in content.tensors]
    return {name: known[name] for name in (*parameters, *(name for names in parallel.buffers for name in names))}
