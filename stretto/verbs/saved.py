"""`stretto convert` and `stretto inspect`: what was saved, as another format and as a list."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stretto.verbs.words import SAVED, Verb, print_json, stdout_kept_for

if TYPE_CHECKING:
    from stretto.checkpoint.kinds import Told


PLACES = (
    "a checkpoint, a run folder (its newest is taken), or a folder of Hugging Face, torch.distributed.checkpoint, DeepSpeed or Megatron"
)


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help=PLACES)
    parser.add_argument("target", metavar="DST", help="the folder that is made")
    parser.add_argument(
        "--to",
        choices=("huggingface", "dcp", "torchtitan", "checkpoint"),
        help="dcp: of torch.distributed.checkpoint, as FSDP2 scripts have it; torchtitan: the same with torchtitan's keys "
        "(default: huggingface for a checkpoint, checkpoint for anything else)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _convert(asked: argparse.Namespace) -> int:
    from stretto.checkpoint.convert import convert

    with stdout_kept_for(asked.json):
        told = convert(asked.source, asked.target, asked.to)
    print_json(told.as_json()) if asked.json else print(_holding(told))
    return 0


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="DIR", help=PLACES)
    parser.add_argument("--verify", action="store_true", help="read all of it, and hold every block of bytes against its checksum")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _inspect(asked: argparse.Namespace) -> int:
    from stretto.checkpoint.kinds import inspect

    told = inspect(asked.place, verify=asked.verify)
    print_json(told.as_json()) if asked.json else print(_holding(told))
    return 0


def _holding(told: Told) -> str:
    """What a folder holds, for a person."""
    from stretto.draw.numbers import bytes_

    about = {key: value for key, value in told.about.items() if key not in ("path", "kinds")}
    lines = [f"{told.about['path']}: {told.kind}, {told.tensors} tensors, {bytes_(told.bytes_)}"]
    lines += [f"  {key}: {value}" for key, value in about.items()]
    lines += [f"  {kind}/: {bytes_(size)}" for kind, size in told.about.get("kinds", {}).items()]
    return "\n".join([*lines, *(f"  {name}  {bytes_(size)}" for name, size in told.files.items())])


CONVERT = Verb("a checkpoint as a Hugging Face folder or of DCP, and back", f"stretto convert {SAVED} model", _convert_options, _convert)
INSPECT = Verb("what a checkpoint holds", f"stretto inspect {SAVED}", _inspect_options, _inspect)
