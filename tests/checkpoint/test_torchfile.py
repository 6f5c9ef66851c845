"""Files of torch.save: every tensor is found where it lies, and nothing that a file names is run."""

from __future__ import annotations

import os
import zlib
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch

from stretto.checkpoint.parts import DTYPES, NAMES
from stretto.checkpoint.torchfile import Kept, Named, read_archive, read_pickle
from stretto.errors import Damaged, JobError


class Own:
    """A class of a user's own."""

    def __init__(self, x):
        self.x = x


def read(path, start=0):
    with open(path, "rb", buffering=0) as file:
        return read_archive(file, start, os.path.getsize(path) - start, str(path))


def values(path, kept):
    """A tensor's values, from the bytes at which it is said to lie; and whether the archive's checksum is theirs."""
    content = path.read_bytes()
    record = content[kept.record.start : kept.record.start + kept.record.bytes_]
    size = DTYPES[kept.dtype].itemsize
    n = torch.Size(kept.shape).numel()
    mine = bytearray(record[kept.first * size : (kept.first + n) * size])
    return torch.frombuffer(mine, dtype=DTYPES[kept.dtype]).view(kept.shape) if n else torch.empty(kept.shape), zlib.crc32(
        record
    ) == kept.record.crc


@pytest.mark.parametrize("dtype", list(NAMES))
def test_a_tensor_of_any_dtype_is_found_where_it_lies_with_its_checksum(dtype, tmp_path):
    tensor = torch.arange(42).view(6, 7).to(dtype)
    torch.save(tensor, tmp_path / "x")
    kept = read(tmp_path / "x")
    found, holds = values(tmp_path / "x", kept)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) and holds and kept.whole and kept.shape == (6, 7)


def test_what_is_saved_comes_back_with_tensors_parameters_and_views(tmp_path):
    base = torch.randn(10, 3)
    with_attribute, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    with_attribute.of = parameter.of = "x"
    content = {
        "a": [base, base[2:4], torch.nn.Parameter(torch.ones(2)), torch.tensor(3.0), torch.zeros(0, 4), with_attribute, parameter],
        "b": OrderedDict(n=1, s="x", none=None, t=(1, 2.5, True)),
        "size": torch.Size([3, 4]),
        "module": torch.nn.Linear(2, 1).state_dict(),  # an OrderedDict with an attribute of torch's
        "args": Namespace(layers=2, dtype=torch.bfloat16),
    }
    torch.save(content, tmp_path / "x")
    found = read(tmp_path / "x")
    for kept, tensor in zip(found["a"], content["a"], strict=True):
        back, holds = values(tmp_path / "x", kept)
        assert torch.equal(back, tensor.detach()) and holds
    assert [kept.whole for kept in found["a"]] == [True, False, True, True, True, True, True]
    assert found["module"].keys() == content["module"].keys()
    assert found["b"] == dict(content["b"]) and found["size"] == (3, 4) and found["args"] == content["args"]


def test_an_archive_inside_a_file_is_read_where_it_begins(tmp_path):
    torch.save(torch.arange(5), tmp_path / "x")
    (tmp_path / "y").write_bytes(b"something before" + (tmp_path / "x").read_bytes())
    kept = read(tmp_path / "y", start=16)
    assert torch.equal(values(tmp_path / "y", kept)[0], torch.arange(5))


def test_objects_of_other_classes_are_remembered_and_not_made(tmp_path):
    torch.save({"own": Own(5), "tensor": torch.ones(2)}, tmp_path / "x")
    found = read(tmp_path / "x")
    assert isinstance(found["own"], Named) and not isinstance(found["own"], Own) and found["own"].x == 5
    assert type(found["own"]).__name__ == "Own" and isinstance(found["tensor"], Kept)


@pytest.mark.parametrize("call", [(os.mkdir, "harm"), (os.system, "touch harm"), (eval, "open('harm', 'w')"), (exec, "open('harm', 'w')")])
def test_no_function_that_a_file_names_is_called(call, tmp_path, monkeypatch):
    class Harm:
        def __reduce__(self):
            return call[0], (call[1],)

    monkeypatch.chdir(tmp_path)
    torch.save([Harm(), torch.ones(1)], tmp_path / "x")
    assert isinstance(read(tmp_path / "x")[0], Named) and os.listdir(tmp_path) == ["x"]
    torch.load(tmp_path / "x", weights_only=False)  # and it would have been
    assert sorted(os.listdir(tmp_path)) == ["harm", "x"]


def test_what_does_not_lie_row_by_row_and_what_is_no_archive_is_said(tmp_path):
    torch.save(torch.ones(3, 4).T, tmp_path / "x")
    with pytest.raises(JobError, match=r"shape \[4, 3\] with strides \[1, 4\] does not lie row by row"):
        read(tmp_path / "x")
    torch.save(torch.ones(3), tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(Damaged, match="old is no archive of torch.save"):
        read(tmp_path / "old")
    torch.save(torch.ones(300), tmp_path / "x")
    os.truncate(tmp_path / "x", 1000)
    with pytest.raises(Damaged, match="x is no archive of torch.save, or is damaged or cut short"):
        read(tmp_path / "x")
    with pytest.raises(Damaged, match="y cannot be read"):
        read_pickle(b"\x80\x04junk", "y")
