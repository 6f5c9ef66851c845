"""What a checkpoint says of itself is read back as it was written, or not at all."""

from __future__ import annotations

import json
import math

import pytest

from stretto.checkpoint.manifest import VERSION, Entry, Manifest, Scalar, Stored
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Box

ROWS = (Stored(Box((0, 0), (2, 3)), "a", 64, (7,)), Stored(Box((2, 0), (1, 3)), "b", 64, (8, 2**32 - 1)))
WHOLE = Manifest(
    7,
    "dp=2",
    2,
    {"model/w": Entry((3, 3), "F32", ROWS, ("v",), False), "buffer/empty": Entry((0,), "I64", ())},
    {"optimizer/w/step": Scalar("F32", 3.0), "option/w/k": Scalar("", math.inf)},
    {"a": 88, "b": 76},
    {"steps": 7, "scale": None},
    {"best": [5, 0.1 + 0.2]},
    {"model": {"name": "tiny \N{SNOWMAN}"}},
    {"time": 1.5},
    4096,
)


def test_a_manifest_is_read_back_as_it_was_written():
    assert Manifest.from_json(WHOLE.to_json(), "here") == WHOLE


def test_it_is_json_with_a_line_a_tensor_that_others_can_read():
    text = WHOLE.to_json()
    assert json.loads(text)["tensors"]["model/w"]["shape"] == [3, 3]
    assert [line for line in text.splitlines() if line.startswith('  "model/w":')]


def test_any_changed_character_is_found():
    text = WHOLE.to_json()
    for at in range(len(text) - 2):  # the last two close the file: without them it is no JSON, and white space says nothing
        changed = text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]
        with pytest.raises((Damaged, JobError)):
            assert Manifest.from_json(changed, "here") == WHOLE, at


def test_a_manifest_cut_short_is_damaged_wherever_it_ends():
    text = WHOLE.to_json()
    for at in range(0, len(text) - 2, 7):
        with pytest.raises(Damaged, match="here"):
            Manifest.from_json(text[:at], "here")


def test_a_newer_schema_is_a_request_for_a_newer_stretto():
    newer = WHOLE.to_json().replace(f'"version": {VERSION}', f'"version": {VERSION + 1}')
    with pytest.raises(JobError, match=rf"here has schema version {VERSION + 1}.*reads version {VERSION}; install a newer stretto"):
        Manifest.from_json(newer, "here")
    with pytest.raises(JobError, match="not the manifest of a stretto checkpoint"):
        Manifest.from_json('{"format": "other", "version": 1}', "here")


def holding(*boxes):
    return Manifest(1, "dp=1", 1, {"model/w": Entry((3, 3), "F32", tuple(Stored(box, "a", 0, ()) for box in boxes))})


def test_every_element_must_be_stored_exactly_once():
    holding(Box((0, 0), (2, 3)), Box((2, 0), (1, 3))).check()
    gap = holding(Box((0, 0), (2, 3)))
    twice = holding(Box((0, 0), (2, 3)), Box((1, 0), (2, 3)))
    gap_and_twice = holding(Box((0, 0), (2, 3)), Box((1, 0), (1, 3)))
    for wrong in (gap, twice, gap_and_twice):
        with pytest.raises(Damaged, match="model/w"):
            wrong.check()
    WHOLE.check()
