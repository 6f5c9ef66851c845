"""Which memory a tensor lies in, and how many bytes of it there are on a device: counted as operators make and drop them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.comm.crossing import CARRY


def memory_of(x: Tensor) -> int:
    """The same number for all tensors that lie in one storage; also where it has no address, as on the meta device. It is free to
    mean another storage once this one is gone."""
    return int(x.untyped_storage()._cdata)


class Storages(TorchDispatchMode):
    """Within it, every storage on `device` that an operator of this thread makes is counted until the last tensor lets it go.

    What a kernel takes for itself and gives back before it returns is not seen, nor what was made before. The bytes are told apart
    by what they are for: kinds that were named (`name`); "activations", what an action left for later ones; "working", all else.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.bytes_: dict[str, int] = {"activations": 0, "working": 0}
        self.live = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._kind: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._new: set[int] = set()  # of the action under way
        self._makes: dict[Any, bool] = {}  # operator -> whether it can make a storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; to keep the compiler out would cost as much as an operator, each time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CARRY:
            with self:  # a collective of activations is Python again: what it makes is counted as well
                return args[1].carry(args[0], *args[2:])
        out = self.run(func, args, kwargs or {})
        makes = self._makes.get(func)
        if makes is None:
            makes = self._makes[func] = any(made.alias_info is None for made in func._schema.returns)
        if not makes:
            return out
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for x in out:
                if isinstance(x, Tensor):
                    self._see(x)
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operator itself."""
        return func(*args, **kwargs)

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._watched or x.device.type != self.device.type:
            return
        size = storage.nbytes()
        self._watched[key] = weakref.ref(storage, functools.partial(self._gone, key))
        self._sizes[key], self._kind[key] = size, "working"
        self._new.add(key)
        self.bytes_["working"] += size
        self.live += size
        if self.live > self.peak:
            self._note()

    def _gone(self, key: int, _: object) -> None:
        size, kind = self._sizes.pop(key), self._kind.pop(key)
        self._watched.pop(key)
        self._new.discard(key)
        self.bytes_[kind] -= size
        self.live -= size

    def _note(self) -> None:
        self.peak, self.at_peak = self.live, dict(self.bytes_)

    def look(self) -> int:
        """The most bytes seen since the last `begin`."""
        return self.peak

    def begin(self) -> None:
        """An action begins: what the one before it has left is for later ones. The peak is counted anew."""
        for key in self._new:
            if self._kind[key] == "working":
                self._move(key, "activations")
        self._new.clear()
        self._note()

    def name(self, kinds: Mapping[str, Iterable[Tensor]]) -> None:
        """Say what is held for what, seen before or not. All else is working memory from now on."""
        for key in list(self._kind):
            self._move(key, "working")
        self._new.clear()
        for kind, tensors in kinds.items():
            self.bytes_.setdefault(kind, 0)
            for x in tensors:
                self._see(x)  # it may have been made before
                self._move(memory_of(x), kind)
        self._note()

    def _move(self, key: int, kind: str) -> None:
        self.bytes_[self._kind[key]] -= self._sizes[key]
        self.bytes_[kind] += self._sizes[key]
        self._kind[key] = kind


#: In the order in which they are told.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "held between steps",
        "gradients": "held between steps",
        "optimizer": "master copies and moments",
        "buffers": "whole parameters and gradients that live for a while, and the model's own buffers",
        "activations": "what forwards left for their backwards, and messages between stages",
        "working": "what the action under way has made",
    }
)
