"""The model of an engine as a Hugging Face folder: whole tensors come to rank 0 one at a time, which writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from stretto.checkpoint.huggingface import Listed, write_folder
from stretto.checkpoint.parts import NAMES
from stretto.checkpoint.save import told
from stretto.checkpoint.store import Store
from stretto.errors import RunError, StrettoError
from stretto.models.pretrained import config_of, name_there

if TYPE_CHECKING:
    from stretto.engine.engine import Engine


def save_pretrained(engine: Engine, store: Store, name: str) -> None:
    """See Engine.save_pretrained. An error of rank 0 is everybody's."""
    config = config_of(engine.model)
    shapes = {
        slot.name: (NAMES[group.values().dtype], group.places[slot.name].shape)
        for group in engine.parallel.groups
        for slot in group.plan.slots
    }
    kept = set(engine.model.state_dict(keep_vars=True))
    shapes |= {key: (NAMES[buffer.dtype], tuple(buffer.shape)) for key, buffer in engine.model.named_buffers() if key in kept}
    listed = [Listed(name_there(key, config), dtype, shape) for key, (dtype, shape) in shapes.items()]
    coming = engine.full_state()

    def values() -> Iterator[Tensor]:
        for key, tensor in coming:
            if key in shapes and tensor is not None:  # other names of a tied weight are not written
                yield tensor

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
