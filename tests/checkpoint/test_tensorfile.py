"""Files that others can open: safetensors' own reader finds what was written."""

from __future__ import annotations

import json
import struct

import torch
from safetensors import safe_open

from stretto.checkpoint.tensorfile import LENGTH, header, key_of, parse
from stretto.layout.layout import Box


def test_safetensors_reads_what_is_written(tmp_path):
    a, b = torch.randn(3, 4), torch.arange(5)
    head = header([("b", "I64", (5,)), ("a[0:3,2:6]", "F32", (3, 4))], {"format": "pt"})
    assert len(head) % 64 == 0
    (tmp_path / "f").write_bytes(head + b.numpy().tobytes() + a.numpy().tobytes())
    with safe_open(tmp_path / "f", "pt") as file:
        assert set(file.keys()) == {"a[0:3,2:6]", "b"} and file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("a[0:3,2:6]"), a) and torch.equal(file.get_tensor("b"), b)


def test_a_header_is_read_back_with_places_in_the_file():
    head = header([("x", "BF16", (2, 2)), ("y", "U8", ())], {})
    (length,) = struct.unpack_from("<Q", head)
    assert length == len(head) - LENGTH.size and json.loads(head[LENGTH.size :])
    items, about = parse(head[LENGTH.size :], len(head))
    assert items["x"] == ("BF16", (2, 2), len(head), len(head) + 8) and items["y"].stop == len(head) + 9 and about == {}


def test_a_key_says_which_part_of_a_tensor_it_is():
    assert key_of("w", (3, 4), Box((0, 0), (3, 4))) == "w"
    assert key_of("w", (3, 4), Box((1, 0), (2, 4))) == "w[1:3,0:4]"
