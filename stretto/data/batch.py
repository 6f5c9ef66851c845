"""Batch: named tensors that share a number of rows, and the parts they are cut into.

Every cut a batch goes through (rows over ranks, rows over microbatches) is the same balanced cut, so any rank can tell who has
which row. A part may have no rows: its tensors then have a first dim of 0, and whoever holds it takes part with weight zero.
"""

from __future__ import annotations

import zlib
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from stretto.errors import JobError
from stretto.layout.layout import split

NOT_COUNTED = -100  # a target with this value is not part of the loss, as in torch and transformers


@dataclass(frozen=True)
class Batch:
    """What one step (or one part of it) is computed from: values by name, as the model's forward takes them.

    Tensors and lists whose first dim is `rows` belong to the rows and are cut with them; everything else is passed on whole.
    `local` says that these are one rank's own rows already, not the rows of the whole step; `first` is the number, among the rows of
    the whole step, of the first of these.
    """

    values: Mapping[str, Any]
    rows: int
    local: bool = False
    first: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any] | Batch, *, local: bool = False) -> Batch:
        """A mapping as a Batch. Its rows are the first dim of `input_ids`, or of the first tensor where there is none."""
        if isinstance(values, Batch):
            return replace(values, local=values.local or local)
        if not isinstance(values, Mapping):
            raise JobError(f"a batch is a mapping of names to tensors, not a {type(values).__name__}; return a dict (collate_fn makes one)")
        leading = [values["input_ids"]] if "input_ids" in values else list(values.values())
        rows = next((len(x) for x in leading if isinstance(x, Tensor) and x.dim() > 0), None)
        if rows is None:
            named = ", ".join(map(str, values)) or "nothing"
            raise JobError(f"a batch needs a tensor with rows, and this one has {named}; give input_ids [B, T]")
        return cls(dict(values), rows, local)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def keys(self) -> KeysView[str]:
        """The names; with this and [...], `model(**batch)` and `dict(batch)` work."""
        return self.values.keys()

    def items(self) -> ItemsView[str, Any]:
        """Pairs of name and value."""
        return self.values.items()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a name, or the default."""
        return self.values.get(name, default)

    def cut(self, start: int, stop: int) -> Batch:
        """The rows [start, stop), as views; cut(0, 0) is the batch of a rank that has nothing to add."""
        values = {name: cut_rows(value, self.rows, start, stop) for name, value in self.values.items()}
        return Batch(values, stop - start, self.local, self.first + start)

    def part(self, parts: int, index: int) -> Batch:
        """This data-parallel coordinate's own rows of a global batch."""
        return replace(self.cut(*split(self.rows, parts, index)), local=True)

    def microbatches(self, count: int) -> list[Batch]:
        """The rows in `count` parts, one forward each; always `count` of them, because every rank must run as many."""
        return [self.cut(*split(self.rows, count, i)) for i in range(count)]

    def to(self, device: torch.device | str, float_dtype: torch.dtype | None = None) -> Batch:
        """The batch on a device, its floating-point tensors in `float_dtype` (None: as they are); integers keep their dtype."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, float_dtype if value.is_floating_point() else None, non_blocking=True)
            return {name: moved(v) for name, v in value.items()} if isinstance(value, Mapping) else value

        return replace(self, values={name: moved(value) for name, value in self.values.items()})

    def fingerprint(self) -> int:
        """32 bits of what is in it: ranks that must hold the same rows compare this, ranks that must not do too."""
        check = zlib.crc32(str(self.rows).encode())
        for name, value in sorted(self.values.items()):
            if isinstance(value, Tensor):
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                check = zlib.crc32(data.numpy().tobytes(), zlib.crc32(name.encode(), check))
        return check


def cut_rows(value: Any, rows: int, start: int, stop: int) -> Any:
    """The rows [start, stop) of one value if it has `rows` rows, else the value itself; mappings are cut value by value."""
    if isinstance(value, Mapping):
        return {name: cut_rows(v, rows, start, stop) for name, v in value.items()}
    has_rows = (isinstance(value, Tensor) and value.dim() > 0) or isinstance(value, (list, tuple))
    return value[start:stop] if has_rows and len(value) == rows else value


def prepare_labels(values: Mapping[str, Any] | Batch) -> Batch:
    """The batch with `labels` (aligned with input_ids) turned into `shift_labels` (what each position is to predict).

    labels: [B, T] -> shift_labels: [B, T], the last position of each row not counted. Done once, on whole sequences: after any
    cut along T the token behind a piece's last one would be lost. A batch without `labels` is returned as it is. Only for the
    next-token loss: a loss of the user's own gets its labels untouched.
    """
    batch = Batch.of(values)
    if "labels" not in batch:
        return batch
    if "shift_labels" in batch:
        raise JobError("the batch has both labels and shift_labels; give labels (aligned with input_ids), or shift_labels instead")
    labels = batch["labels"]
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        what = f"shape {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise JobError(f"labels for the next-token loss are a tensor [B, T] aligned with input_ids, not {what}; hand in a loss of your own")
    shifted = torch.full_like(labels, NOT_COUNTED)
    shifted[:, :-1] = labels[:, 1:]
    kept = {name: value for name, value in batch.items() if name != "labels"}
    return replace(batch, values=kept | {"shift_labels": shifted})


def count_targets(values: Mapping[str, Any] | Batch) -> int:
    """How many targets of `shift_labels` count in the loss; this, not the number of rows, weighs a batch."""
    return int((values["shift_labels"] != NOT_COUNTED).sum())


def collate(samples: Sequence[Any]) -> dict[str, Any]:
    """Samples (mappings of names to tensors, arrays, numbers or lists of numbers) stacked to rows, name by name.

    torch's default_collate would turn a list of numbers, as Hugging Face datasets give them, into a list of columns.
    """
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise JobError(f"a sample is a mapping of names to tensors, not a {type(sample).__name__}; return a dict, or give a collate_fn")
    try:
        stacked = default_collate([{name: as_tensor(value) for name, value in sample.items()} for sample in samples])
    except (RuntimeError, KeyError, ValueError) as error:
        raise JobError(f"samples do not stack to one batch: {str(error).splitlines()[0]}; give a collate_fn that pads them") from error
    return dict(stacked)


def as_tensor(value: Any) -> Any:
    """A list of numbers as a tensor; anything else as it is."""
    return torch.tensor(value) if isinstance(value, list) and value and not isinstance(value[0], (str, bytes, Mapping)) else value
