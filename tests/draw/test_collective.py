"""The picture and the page of a collective show the hops that run, and need nothing else to be seen."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from stretto.draw.collective import COLOURS, svg
from stretto.draw.collective_page import page
from stretto.errors import JobError
from stretto.schedule.algorithms import possible, program
from stretto.schedule.collective import COLLECTIVES, Program, states

NAMES = [(collective, algorithm) for collective in COLLECTIVES for algorithm in possible(collective)]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(one: Program) -> ElementTree.Element:
    return ElementTree.fromstring(svg(one))


def of_class(picture: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in picture.iter() if element.get("class") == name]


def in_legend(picture: ElementTree.Element, name: str) -> int:
    return sum(len(of_class(sign, name)) for sign in picture.iter(f"{SVG}g"))


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_each_box_holds_what_the_rank_has_then(collective: str, algorithm: str) -> None:
    one = program(collective, algorithm, 5, root=2)
    picture = drawn(one)
    held = [{place: set(found) for place, found in now.items()} for _, now in states(one)]
    stripes = Counter(COLOURS[source] for now in held for found in now.values() for source in found)
    boxes = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("fill") in COLOURS]
    legend = [rect for sign in picture.iter(f"{SVG}g") for rect in sign.iter(f"{SVG}rect") if rect.get("fill")]
    assert Counter(rect.get("fill") for rect in boxes) == stripes + Counter(rect.get("fill") for rect in legend)
    empty = sum(5 * one.chunks - len(now) for now in held)
    assert len(of_class(picture, "empty")) == empty
    complete = sum(found == set(one.starts(chunk)) and rank in one.ends(chunk) for now in held for (rank, chunk), found in now.items())
    assert len(of_class(picture, "done")) - in_legend(picture, "done") == complete


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", way) for way in possible("all_reduce")])
def test_arrows_go_from_sender_to_receiver_and_say_whether_it_is_added(collective: str, algorithm: str) -> None:
    one = program(collective, algorithm, 4)
    picture = drawn(one)
    ends = [path for path in of_class(picture, "flight") if path.get("marker-end")]
    chunks = sum(len(message.chunks) for turns in one.turns for turn in turns for message in turn.sends)
    messages = sum(len(turn.sends) for turns in one.turns for turn in turns)
    assert messages <= len(ends) <= chunks  # chunks that lie side by side go together
    for path in ends:
        assert path.get("stroke") == COLOURS[int(re.fullmatch(r"url\(#to(\d)\)", path.get("marker-end"))[1])]
    rounds = [text.text for text in of_class(picture, "small") if text.text in ("sent and added", "sent")]
    reduces = [any(hop.reduce for hop in hops) for hops, _ in states(one)][1:]
    assert rounds == ["sent and added" if reduce else "sent" for reduce in reduces]
    assert bool(len(of_class(picture, "plus")) - in_legend(picture, "plus")) == any(reduces)


def test_on_a_ring_what_leaves_at_the_right_comes_in_at_the_left() -> None:
    picture = drawn(program("all_gather", "ring", 4))
    paths = [path.get("d") for path in of_class(picture, "flight")]
    assert len(paths) == 3 * 5  # three arrows a round, and one in two parts
    assert len([path for path in of_class(picture, "flight") if path.get("marker-end")]) == 3 * 4


def test_the_picture_says_who_is_root_and_which_ranks_share_a_node() -> None:
    texts = [text.text for text in drawn(program("broadcast", "hierarchical", 6, root=4, nodes=2)).iter(f"{SVG}text")]
    assert "rank 4 (root)" in texts and {"node 0", "node 1"} <= set(texts) and "node 2" not in texts
    texts = [text.text for text in drawn(program("all_reduce", "torus", 6, nodes=3)).iter(f"{SVG}text")]
    assert {"row 0", "row 1", "row 2"} <= set(texts)


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_everything_lies_on_the_sheet(collective: str, algorithm: str, n: int) -> None:
    picture = drawn(program(collective, algorithm, n))
    _, _, width, height = map(float, picture.get("viewBox").split())
    for element in picture.iter():
        for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            if element.get(name):
                assert 0 <= float(element.get(name)) <= most
        for number in re.findall(r"-?[\d.]+", element.get("d") or ""):
            assert 0 <= float(number) <= max(width, height)


def test_the_page_holds_every_moment_of_the_program_and_what_each_rank_has_sent() -> None:
    one = program("all_reduce", "halving-doubling", 6)
    data = json.loads(re.search(r'<script type="application/json" id="program">(.*?)</script>', page(one))[1])
    for shot, (hops, held) in zip(data["shots"], states(one), strict=True):
        assert {tuple(map(int, place.split())): set(found) for place, found in shot["held"].items()} == {p: set(f) for p, f in held.items()}
        assert {(src, dst, c, r) for src, dst, chunks, r in shot["messages"] for c in chunks} == {hop[1:] for hop in hops}
    assert sum(data["shots"][-1]["sent"]) == pytest.approx(len(one.hops) * one.share())
    assert data["starts"] == [list(range(6))] * one.chunks


def test_picture_and_page_need_no_other_file() -> None:
    one = program("all_reduce", "ring", 4)
    for text in (svg(one), page(one)):
        assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
        assert not re.search(r"\b(src|href)=", text) and "@import" not in text and "url(http" not in text


def test_what_nobody_could_read_is_refused() -> None:
    for one in (program("all_gather", "ring", 17), program("broadcast", "ring", 16, pieces=30), program("all_to_all", "torus", 16)):
        for draw in (svg, page):
            with pytest.raises(JobError, match=r"cannot be read; write --ranks 16|write fewer --ranks or --pieces"):
                draw(one)
