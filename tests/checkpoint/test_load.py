"""Boxes of one cut filled from the files of another, by hypothesis: against slicing one whole tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.checkpoint.load import fetch, read_manifest
from stretto.checkpoint.manifest import Entry, Manifest
from stretto.checkpoint.names import compare
from stretto.checkpoint.parts import HostCopy, Part, share_out
from stretto.checkpoint.save import Content, joined, write_file
from stretto.checkpoint.store import LocalStore
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Flat, Layout
from stretto.layout.mesh import Mesh

CONTENT = Content(3, "dp=1", 1)


def cut(values: torch.Tensor, layout: Layout, mesh: Mesh, name: str = "model/w") -> list[Part]:
    """Each rank's part of a whole tensor."""
    parts = []
    for rank in range(mesh.size):
        boxes = layout.boxes(tuple(values.shape), mesh, rank)
        mine = [values[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape))].reshape(-1) for b in boxes]
        flat = torch.cat(mine) if mine else values.new_empty(0)
        parts.append(Part(name, tuple(values.shape), boxes, flat, (0, len(flat)), speaks=layout.first_holder(mesh, rank)))
    return parts


def write(folder, parts_of_ranks, block=64, name="c") -> Manifest:
    store, records = LocalStore(folder), []
    for rank, parts in enumerate(parts_of_ranks):
        host = HostCopy(parts, pinned=False)
        host.take()
        records.append(write_file(store, f"{name}.tmp", rank, host, CONTENT, block))
    manifest = replace(joined(records, CONTENT), block=block)
    manifest.check()
    store.commit(f"{name}.tmp", name, manifest.to_json().encode())
    return manifest


def read(folder, part, name="c"):
    store = LocalStore(folder)
    empty = replace(part, values=torch.zeros_like(part.values))
    host = HostCopy([empty], pinned=False)
    count = fetch(store, name, read_manifest(store, name), host)
    return host.flat(host.places[0]).clone(), count


@st.composite
def layouts(draw, shape):
    """A layout on a mesh of up to 6 ranks: dims cut by tp, the rest flat by dp, or not."""
    mesh = Mesh.of(dp=draw(st.integers(1, 3)), tp=draw(st.integers(1, 2)))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = tuple(("tp",) if d == dim and draw(st.booleans()) else () for d in range(len(shape)))
    if not draw(st.booleans()):
        return Layout(cuts), mesh
    total = math.prod(shape) + 9
    points = sorted(draw(st.lists(st.integers(0, total), min_size=mesh["dp"] - 1, max_size=mesh["dp"] - 1)))
    return Layout(cuts, flat=Flat(("dp",), draw(st.integers(0, 9)), total, (0, *points, total))), mesh


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_cut_is_filled_from_any_other(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    values = torch.arange(math.prod(shape)).to(dtype).view(shape)
    folder = tmp_path_factory.mktemp("c")
    saved = data.draw(layouts(shape))
    write(folder, [[part] for part in cut(values, *saved)], block=data.draw(st.sampled_from([8, 64, 1 << 20])))
    for part in cut(values, *data.draw(layouts(shape))):
        assert torch.equal(read(folder, part)[0], part.values)


def test_only_what_a_rank_needs_is_read_each_block_once(tmp_path):
    values, by_dp = torch.arange(64 * 32.0).view(64, 32), Layout(((), ()), flat=Flat(("dp",), 0, 2048, (0, 512, 1024, 1536, 2048)))
    write(tmp_path, [[part] for part in cut(values, by_dp, Mesh.of(dp=4))], block=128)
    halves = cut(values, Layout((("dp",), ())), Mesh.of(dp=2))
    assert [read(tmp_path, part)[1] for part in halves] == [4096, 4096]
    columns = cut(values, Layout(((), ("tp",))), Mesh.of(tp=2))
    assert all(read(tmp_path, part)[1] == 8192 for part in columns)  # rows are stored whole: half of each is wanted


def test_values_change_their_dtype_on_the_way_where_the_reader_has_another(tmp_path):
    values = torch.randn(40, 7)
    write(tmp_path, [cut(values, Layout.whole((40, 7)), Mesh.of())], block=64)
    (part,) = cut(values.double(), Layout.whole((40, 7)), Mesh.of())
    assert torch.equal(read(tmp_path, part)[0], values.double().view(-1))


def test_a_flipped_bit_anywhere_is_an_error_that_names_tensor_and_file(tmp_path):
    a, b = torch.randn(50), torch.randn(3, 5)
    whole = Mesh.of()
    parts = cut(a, Layout.whole((50,)), whole, "model/a") + cut(b, Layout.whole((3, 5)), whole, "model/b")
    manifest = write(tmp_path, [parts], block=64)
    file = tmp_path / "c" / "rank-00000.safetensors"
    clean = file.read_bytes()
    for name, part in (("model/a", parts[0]), ("model/b", parts[1])):
        (stored,) = manifest.tensors[name].stored
        for at in range(stored.start, stored.start + part.values.numel() * 4, 13):
            broken = bytearray(clean)
            broken[at] ^= 1 << (at % 8)
            file.write_bytes(broken)
            with pytest.raises(Damaged, match=rf"{name} is damaged.*rank-00000\.safetensors"):
                read(tmp_path, part)
    file.write_bytes(clean)
    assert torch.equal(read(tmp_path, parts[0])[0], a)


def test_a_missing_a_short_and_a_long_file_are_told_before_anything_is_read(tmp_path):
    (part,) = cut(torch.randn(50), Layout.whole((50,)), Mesh.of())
    write(tmp_path, [[part]])
    file = tmp_path / "c" / "rank-00000.safetensors"
    clean = file.read_bytes()
    for content, words in ((clean[:-1], "cut short"), (clean + b"x", "cut short or changed"), (None, "is missing")):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(Damaged, match=rf"rank-00000\.safetensors.*{words}"):
            read_manifest(LocalStore(tmp_path), "c")
    with pytest.raises(JobError, match="holds no checkpoint"):
        read_manifest(LocalStore(tmp_path), "nothing")


def entries(**shapes):
    return Manifest(1, "dp=1", 1, {f"model/{name}": Entry(shape, "F32", ()) for name, shape in shapes.items()})


def test_what_differs_from_the_model_is_listed_by_name():
    there = entries(a=(2,), b=(3, 4), c=(1,))
    compare(there, "x", {"model/a": (2,), "model/b": (3, 4), "model/c": (1,)}, ())
    with pytest.raises(JobError) as error:
        compare(there, "x", {"model/a": (2,), "model/b": (4, 3), "model/d": (1,)}, ())
    said = str(error.value)
    assert "1 not in it: model/d" in said and "1 not in the model: model/c" in said and "model/b is [3, 4] there and [4, 3] here" in said
    assert "--allow-missing" in said
    compare(there, "x", {"model/a": (2,), "model/b": (3, 4), "model/d": (1,)}, ("c", "model/d*"))
    with pytest.raises(JobError, match="20 not in it: model/n0 model/n1 model/n10 model/n11 model/n12 and 15 more"):
        compare(there, "x", {f"model/n{i}": (1,) for i in range(20)}, ("[abc]",))


def test_copies_are_shared_out_once_and_small_ones_go_to_one():
    for elements, copies in ((1 << 16, 3), (100, 3), (0, 2), ((1 << 18) + 1, 1)):
        bounds = share_out("model/w", elements, 4, copies)
        assert len(bounds) == copies + 1 and bounds[0] == 0 and bounds[-1] == elements and list(bounds) == sorted(bounds)
        shares = [b - a for a, b in pairwise(bounds)]
        assert max(shares) - min(shares) <= 1 if elements * 4 >= 1 << 16 else sorted(shares)[:-1] == [0] * (copies - 1)
