"""Values out of a folder are those of its tensors, and no more bytes are read than are asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.checkpoint import values as module
from stretto.checkpoint.huggingface import Listed, write_folder
from stretto.checkpoint.parts import NAMES
from stretto.checkpoint.store import place_of
from stretto.checkpoint.values import FolderValues
from stretto.errors import JobError
from stretto.layout.layout import Box

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files, and tensors of one to three dims."""
    torch.manual_seed(0)
    tensors = {
        f"{shape}{dtype}": torch.randn(shape).to(dtype) for shape in ((37,), (12, 9), (5, 300), (4, 3, 6), (2, 3, 400)) for dtype in DTYPES
    }
    store, name = place_of(tmp_path_factory.mktemp("values") / "hf")
    write_folder(store, name, {}, [Listed(n, NAMES[x.dtype], tuple(x.shape)) for n, x in tensors.items()], tensors.values(), shard=9000)
    return store.path(name), tensors


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_comes_out_in_the_dtype_that_is_asked_for(folder, data):
    path, tensors = folder
    name = data.draw(st.sampled_from(sorted(tensors)))
    whole = tensors[name].reshape(-1)
    start = data.draw(st.integers(0, whole.numel()))
    out = torch.zeros(data.draw(st.integers(0, whole.numel() - start)), dtype=data.draw(st.sampled_from([*DTYPES, torch.float64])))
    values = FolderValues(path, {"x": name})
    values("x", start, out)
    assert torch.equal(out, whole[start : start + out.numel()].to(out.dtype))
    assert values.bytes_read == out.numel() * whole.element_size()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_box_comes_out_and_long_rows_are_not_read_whole(folder, data):
    path, tensors = folder
    name = data.draw(st.sampled_from(sorted(tensors)))
    whole = tensors[name]
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in whole.shape)
    shape = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(whole.shape, offset))
    out = torch.zeros(shape, dtype=data.draw(st.sampled_from(DTYPES)))
    values = FolderValues(path, {"x": name})
    values.box("x", Box(offset, shape), out)
    assert torch.equal(out, whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))].to(out.dtype))
    if shape[1:] == whole.shape[1:] or shape[-1] * whole.element_size() >= module.SHORT:
        assert values.bytes_read == out.numel() * whole.element_size()


def test_what_a_folder_has_no_values_for_is_named(folder):
    with pytest.raises(JobError, match=r"holds no values for lost \(1 in all\)"):
        FolderValues(folder[0], {"lost": "lost", "x": sorted(folder[1])[0]})
