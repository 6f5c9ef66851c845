"""Trees along which collectives send: their shapes, and the rounds in which a message or a row of pieces goes through them.

A rank sends one message and receives one message in a round. Positions are counted from the root, which is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

#: The children of each position, in the order in which they are served.
Tree = Sequence[Sequence[int]]
#: (source, destination, what) at once, round after round.
Steps = list[list[tuple[int, int, int]]]


def star(n: int) -> Tree:
    """The root serves everybody."""
    return [range(1, n), *([()] * (n - 1))]


def chain(n: int) -> Tree:
    """Each serves the next."""
    return [(i + 1,) if i + 1 < n else () for i in range(n)]


def chain_left(n: int) -> Tree:
    """The root serves the last, that one the last but one, and so on."""
    return [((i - 1) % n,) if n > 1 and i != 1 else () for i in range(n)]


def in_order(n: int) -> Tree:
    """A balanced binary tree of positions 1 .. n-1 in which odd ones are leaves; the root above it has one child.

    The parent of a position is it with its lowest bit moved one up, or taken away where that leads outside (NCCL's rule, REFERENCE
    A3). The child on the left has the deeper tree below it, so it is served first.
    """
    children: list[list[int]] = [[] for _ in range(n)]
    for position in range(1, n):
        low = position & -position
        above = (position ^ low) | low << 1
        children[above if above < n else position ^ low].append(position)
    return children


def mirrored(n: int) -> Tree:
    """The same tree with other positions in it, so that nobody but the root has children in both (Sanders et al. 2009): read
    backwards where that makes odd positions even, else shifted by one."""
    last = n - 1
    other = [0, *(n - i if last % 2 == 0 else i % last + 1 for i in range(1, n))]
    children: list[list[int]] = [[] for _ in range(n)]
    for position, below in enumerate(in_order(n)):
        children[other[position]] = [other[child] for child in below]
    return children


def pipelined(trees: Sequence[Tree], pieces: int) -> Steps:
    """Pieces go from the root to everybody, piece k through tree k % len(trees), each as early as the ranks on its way are free.

    Where edges of several trees compete, one early piece can hold up a whole row of later ones. So it is also tried with each
    edge used only in rounds of its own turn, and what ends first is taken.
    """
    return min((_served(trees, pieces, turns) for turns in ({}, _turns(trees))), key=len)


def _served(trees: Sequence[Tree], pieces: int, turns: Mapping[tuple[int, int], int]) -> Steps:
    """turns: (tree, child) -> whether even or odd rounds (0 or 1) are those of the edge to that child; any, where it is absent."""
    sending: set[tuple[int, int]] = set()
    receiving: set[tuple[int, int]] = set()
    steps: Steps = []
    for piece in range(pieces):
        number = piece % len(trees)
        has = {0: 0}  # position -> the first round in which it can pass the piece on
        for parent, child in _edges(trees[number]):
            at = has[parent]
            turn = turns.get((number, child))
            while (parent, at) in sending or (child, at) in receiving or turn not in (None, at % 2):
                at += 1
            sending.add((parent, at))
            receiving.add((child, at))
            has[child] = at + 1
            while len(steps) <= at:
                steps.append([])
            steps[at].append((parent, child, piece))
    return steps


def _turns(trees: Sequence[Tree]) -> dict[tuple[int, int], int]:
    """A turn for each edge, so that edges from one rank differ, and edges to one rank too. Nothing if two turns are too few.

    A rank that has two edges out, or two in, ties these together: they form rows and circles, along which turns alternate. All
    circles are even, since ways out and ways in take turns on them (Sanders et al. 2009).
    """
    edges = [(number, parent, child) for number, tree in enumerate(trees) for parent, child in _edges(tree)]
    at: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for edge in edges:
        at.setdefault(("out", edge[1]), []).append(edge)
        at.setdefault(("in", edge[2]), []).append(edge)
    if any(len(together) > 2 for together in at.values()):
        return {}
    turns: dict[tuple[int, int], int] = {}
    for first in edges:
        row = [(first, 0)] if (first[0], first[2]) not in turns else []
        while row:
            edge, turn = row.pop()
            turns[edge[0], edge[2]] = turn
            others = {*at["out", edge[1]], *at["in", edge[2]]} - {edge}
            row += [(other, 1 - turn) for other in others if (other[0], other[2]) not in turns]
    return turns


def up_and_down(tree: Tree, bundles: Sequence[Sequence[int]]) -> Steps:
    """What each position brings goes up to the root, then everything down to everybody; to each only what is new to it."""
    down = pipelined([tree], 1)
    below = [list(bundle) for bundle in bundles]  # what a position brings, with all that is below it
    for parent, child in reversed(list(_edges(tree))):
        below[parent] += below[child]
    known = [set(chunks) for chunks in below]
    up: Steps = [[(child, parent, chunk) for parent, child, _ in edges for chunk in below[child]] for edges in reversed(down)]
    new = [[chunk for chunk in below[0] if chunk not in mine] for mine in known]
    return up + [[(parent, child, chunk) for parent, child, _ in edges for chunk in new[child]] for edges in down]


def _edges(tree: Tree) -> Iterator[tuple[int, int]]:
    """(parent, child), level by level from the root."""
    level = [0] if tree else []
    while level:
        yield from ((parent, child) for parent in level for child in tree[parent])
        level = [child for parent in level for child in tree[parent]]
