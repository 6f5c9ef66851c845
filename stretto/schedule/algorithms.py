"""The named algorithms: each is one way in which parts that lie on different ranks come to be on all of them.

That is an all-gather, and the other collectives follow from it:

    broadcast       an all-gather to which only the root brings something
    gather          of an all-gather the hops that lead to the root
    all_to_all      of an all-gather of all blocks the hops that lead each to its receiver
    barrier         an all-gather of nothing
    reduce_scatter  an all-gather run backwards: where a part spread out, contributions to it come together and are added
    reduce, scatter a broadcast and a gather run backwards
    all_reduce      a reduce_scatter, then an all_gather; for algorithms that send everything through one rank, a reduce, then a
                    broadcast
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stretto.errors import JobError
from stretto.schedule.collective import COLLECTIVES, Hop, Program
from stretto.schedule.trees import Tree, chain, chain_left, in_order, mirrored, pipelined, star, up_and_down

#: What each rank brings: rank -> its chunks.
Bundles = Sequence[Sequence[int]]


class Move(NamedTuple):
    """A chunk goes from one rank to another."""

    src: int
    dst: int
    chunk: int


#: Moves that happen at once, round after round.
Rounds = list[list[Move]]


@dataclass(frozen=True)
class Algorithm:
    """A way to gather, and what else it decides.

    gather: (root, nodes, bundles) -> rounds after which all ranks have all chunks. None: there is no all-gather of this kind.
    trees: (ranks) -> trees from position 0 along which a broadcast goes piece by piece, in turn. None: as it gathers.
    owners: (ranks) -> who holds the finished parts in the middle of an all-reduce. None: it goes through one rank instead.
    halves: pieces of each part that go different ways at the same time.
    grouped: whether it sees the ranks as equal groups (nodes, or rows), and so asks how many.
    back: what is run backwards, where that is not the algorithm itself.
    """

    summary: str
    gather: Callable[[int, int, Bundles], Rounds] | None
    trees: Callable[[int], Sequence[Tree]] | None = None
    owners: Callable[[int], Sequence[int]] | None = None
    halves: int = 1
    grouped: bool = False
    back: Algorithm | None = None


def _everyone(ranks: int) -> Sequence[int]:
    return range(ranks)


def ring(members: Sequence[int], bundles: Bundles) -> Rounds:
    """Each member passes on to its right what came from its left, n - 1 times; in round s it sends the bundle of member i - s."""
    n = len(members)
    return [[Move(members[i], members[(i + 1) % n], chunk) for i in range(n) for chunk in bundles[(i - s) % n]] for s in range(n - 1)]


def ring_left(members: Sequence[int], bundles: Bundles) -> Rounds:
    """The ring the other way round. Run backwards it sends to the right."""
    return ring(members[::-1], bundles[::-1])


def direct(members: Sequence[int], bundles: Bundles) -> Rounds:
    """Everybody sends its bundle to everybody else, all in one round."""
    n = len(members)
    return [[Move(members[i], members[(i + d) % n], chunk) for d in range(1, n) for i in range(n) for chunk in bundles[i]]]


def bruck(members: Sequence[int], bundles: Bundles) -> Rounds:
    """In round k member i sends all it has to member i - 2^k: what each has doubles. Any number of members (Bruck et al. 1997)."""
    n, rounds, have = len(members), [], 1
    while have < n:
        more = min(have, n - have)  # in the last round only what the other lacks
        rounds.append(
            [Move(members[i], members[(i - have) % n], chunk) for i in range(n) for k in range(more) for chunk in bundles[(i + k) % n]]
        )
        have += more
    return rounds


def doubling(members: Sequence[int], bundles: Bundles) -> Rounds:
    """Pairs at distance 1, 2, 4 ... exchange all they have. Where the number of members is no power of two, the first ones pair
    up: the odd one hands its bundle to the even one, which takes part for both and hands it the result (Rabenseifner 2004)."""
    n = len(members)
    power = 1 << (n.bit_length() - 1)
    folded = [(2 * i, 2 * i + 1) for i in range(n - power)]
    inner = [even for even, _ in folded] + list(range(2 * len(folded), n))
    have = {i: list(bundles[i]) for i in range(n)}
    rounds: Rounds = [[Move(members[odd], members[even], chunk) for even, odd in folded for chunk in have[odd]]]
    brought = {odd: set(have[odd]) for _, odd in folded}
    for even, odd in folded:
        have[even] += have[odd]
    distance = 1
    while distance < power:
        pairs = [(inner[v], inner[v ^ distance]) for v in range(power)]
        rounds.append([Move(members[i], members[peer], chunk) for i, peer in pairs for chunk in have[i]])
        have |= {i: have[i] + have[peer] for i, peer in pairs}
        distance *= 2
    rounds.append([Move(members[e], members[o], chunk) for e, o in folded for chunk in have[e] if chunk not in brought[o]])
    return rounds


def doubling_owners(ranks: int) -> Sequence[int]:
    """Those that take part for others too: as many as the largest power of two that there are ranks for."""
    extra = ranks - (1 << (ranks.bit_length() - 1))
    return [2 * i for i in range(extra)] + list(range(2 * extra, ranks))


def _flat(gather: Callable[[Sequence[int], Bundles], Rounds]) -> Callable[[int, int, Bundles], Rounds]:
    """An algorithm among all ranks alike, whoever is root."""
    return lambda root, nodes, bundles: gather(range(len(bundles)), bundles)


def _through(tree: Callable[[int], Tree]) -> Callable[[int, int, Bundles], Rounds]:
    """Everything goes up a tree to the root, then down again to everybody."""

    def gather(root: int, nodes: int, bundles: Bundles) -> Rounds:
        n = len(bundles)
        ranks = [(root + position) % n for position in range(n)]
        rounds = up_and_down(tree(n), [bundles[rank] for rank in ranks])
        return [[Move(ranks[a], ranks[b], chunk) for a, b, chunk in moves] for moves in rounds]

    return gather


def _two_levels(nodes: int, bundles: Bundles, inside_first: bool) -> Rounds:
    """A ring among ranks of one place in their nodes, then one inside each node; or the other way round."""
    n = len(bundles)
    size = n // nodes
    inside = [range(node * size, (node + 1) * size) for node in range(nodes)]
    across = [range(place, n, size) for place in range(size)]
    have = [list(bundle) for bundle in bundles]
    rounds: Rounds = []
    for groups in (inside, across) if inside_first else (across, inside):
        rounds += _together([ring(members, [have[rank] for rank in members]) for members in groups])
        for members in groups:
            gathered = [chunk for rank in members for chunk in have[rank]]
            for rank in members:
                have[rank] = gathered
    return rounds


def _hierarchical(root: int, nodes: int, bundles: Bundles) -> Rounds:
    return _two_levels(nodes, bundles, inside_first=False)


def _torus(root: int, nodes: int, bundles: Bundles) -> Rounds:
    """Even chunks go along columns first, odd ones along rows: both kinds of link are busy all the time."""
    halves = ([[chunk for chunk in bundle if chunk % 2 == half] for bundle in bundles] for half in (0, 1))
    return _together([_two_levels(nodes, half, inside_first=bool(i)) for i, half in enumerate(halves)])


def _double(ranks: int) -> Sequence[Tree]:
    return in_order(ranks), mirrored(ranks)


def _together(several: Sequence[Rounds]) -> Rounds:
    """Their first rounds at once, then their second ones, and so on."""
    longest = max(len(rounds) for rounds in several)
    return [[move for rounds in several for move in (rounds[k] if k < len(rounds) else [])] for k in range(longest)]


_RING_LEFT = Algorithm("", _flat(ring_left), lambda n: (chain_left(n),), _everyone)

ALGORITHMS: Mapping[str, Algorithm] = {
    "naive": Algorithm("everything goes to one rank and from there to all, one after the other", _through(star), lambda n: (star(n),)),
    "direct": Algorithm("everybody sends to everybody at once", _flat(direct), owners=_everyone),
    "ring": Algorithm(
        "each rank passes on to its right what came from its left", _flat(ring), lambda n: (chain(n),), _everyone, back=_RING_LEFT
    ),
    "halving-doubling": Algorithm(
        "pairs exchange, at a distance that doubles each round, or halves while they add", _flat(doubling), owners=doubling_owners
    ),
    "bruck": Algorithm(
        "each rank sends to one other, at a distance that doubles each round, or halves while they add", _flat(bruck), owners=_everyone
    ),
    "tree": Algorithm("along the branches of a binary tree", _through(in_order), lambda n: (in_order(n),)),
    "double-tree": Algorithm("two binary trees, half the data each: who passes on in one is a leaf in the other", None, _double),
    "hierarchical": Algorithm("inside each node, across nodes, inside again", _hierarchical, owners=_everyone, grouped=True),
    "torus": Algorithm("along rows and columns, half the data in either order", _torus, owners=_everyone, halves=2, grouped=True),
}


@lru_cache(maxsize=256)
def program(collective: str, algorithm: str, ranks: int, *, root: int = 0, nodes: int | None = None, pieces: int | None = None) -> Program:
    """The collective by the algorithm among `ranks` ranks.

    root: of broadcast, scatter, gather and reduce. nodes: of algorithms that see groups: into how many equal runs the ranks are
    divided (default: nearest to a square). pieces: of what goes along trees: into how many the data is cut, so that a rank passes
    on one while the next one comes.
    Raises JobError for names and numbers that cannot be.
    """
    way = _asked(collective, algorithm, ranks, root, nodes, pieces)
    rooted = "root" in COLLECTIVES[collective][1:]
    groups = (nodes or _squarest(ranks)) if way.grouped else 1
    phases, cut = _phases(collective, way, ranks, root if rooted else 0, groups, pieces)
    hops: list[Hop] = []
    number = 0
    for rounds, reduce in phases:
        for moves in filter(None, rounds):
            hops += sorted(Hop(number, src, dst, chunk, reduce) for src, dst, chunk in moves)
            number += 1
    return Program(collective, algorithm, ranks, cut, tuple(hops), root if rooted else 0, groups)


def possible(collective: str) -> list[str]:
    """The algorithms that there are for a collective."""
    return [name for name, way in ALGORITHMS.items() if way.gather or (way.trees and COLLECTIVES[collective].parts == "one")]


def _phases(collective: str, way: Algorithm, n: int, root: int, nodes: int, pieces: int | None) -> tuple[list[tuple[Rounds, bool]], int]:
    """(rounds, whether what arrives is added) one after the other, and the number of chunks that each part is cut into."""
    cut = way.halves
    back = way.back or way
    own = [range(i * cut, (i + 1) * cut) for i in range(n)]
    if collective in ("all_gather", "barrier"):
        return [(_spread(way, root, nodes, own), False)], cut
    if collective == "reduce_scatter":
        return [(_backwards(_spread(back, root, nodes, own)), True)], cut
    if collective == "gather":
        return [(_needed(_spread(way, root, nodes, own), {(root, c) for c in range(n * cut)}), False)], cut
    if collective == "scatter":
        return [(_backwards(_needed(_spread(back, root, nodes, own), {(root, c) for c in range(n * cut)})), False)], cut
    if collective == "all_to_all":
        blocks = [range(i * n * cut, (i + 1) * n * cut) for i in range(n)]
        return [(_needed(_spread(way, root, nodes, blocks), {(c // cut % n, c) for c in range(n * n * cut)}), False)], cut
    if collective == "all_reduce" and way.owners:
        owners = way.owners(n)
        owned: list[Sequence[int]] = [()] * n
        for i, owner in enumerate(owners):
            owned[owner] = own[i]
        return [(_backwards(_spread(back, root, nodes, owned)), True), (_spread(way, root, nodes, owned), False)], len(owners) * cut
    cut = pieces or (len(way.trees(n)) if way.trees else cut)
    out, home = (_from_root(one, n, root, nodes, cut) for one in (way, back))
    phases = {"broadcast": [(out, False)], "reduce": [(_backwards(home), True)]}
    return phases.get(collective) or phases["reduce"] + phases["broadcast"], cut


def _spread(way: Algorithm, root: int, nodes: int, bundles: Bundles) -> Rounds:
    assert way.gather, "refused before"
    return way.gather(root, nodes, bundles)


def _from_root(way: Algorithm, n: int, root: int, nodes: int, pieces: int) -> Rounds:
    """All pieces from the root to everybody."""
    if way.trees is None:
        return _spread(way, root, nodes, [range(pieces) if rank == root else () for rank in range(n)])
    return [[Move((root + a) % n, (root + b) % n, piece) for a, b, piece in step] for step in pipelined(way.trees(n), pieces)]


def _backwards(rounds: Rounds) -> Rounds:
    """What spread out comes together."""
    return [[Move(dst, src, chunk) for src, dst, chunk in moves] for moves in reversed(rounds)]


def _needed(rounds: Rounds, wanted: set[tuple[int, int]]) -> Rounds:
    """The moves without which a (rank, chunk) of `wanted` would not be reached. Each rank is sent each chunk at most once."""
    kept: Rounds = []
    for moves in reversed(rounds):
        kept.append([move for move in moves if (move.dst, move.chunk) in wanted])
        wanted.update((move.src, move.chunk) for move in kept[-1])
    return kept[::-1]


def _asked(collective: str, algorithm: str, ranks: int, root: int, nodes: int | None, pieces: int | None) -> Algorithm:
    """The algorithm, if what is asked of it can be."""
    if collective not in COLLECTIVES:
        raise JobError(f"there is no collective {collective!r}; write one of {', '.join(COLLECTIVES)}")
    if algorithm not in ALGORITHMS:
        raise JobError(f"there is no algorithm {algorithm!r}; write one of {', '.join(possible(collective))}")
    if algorithm not in possible(collective):
        raise JobError(f"{algorithm} has no {collective}; write one of {', '.join(possible(collective))}")
    if ranks < 1 or not 0 <= root < ranks:
        raise JobError(f"ranks={ranks}, root={root} is not possible; write 1 rank or more, and a root from 0 to {max(ranks, 1) - 1}")
    way = ALGORITHMS[algorithm]
    if nodes is not None and not way.grouped:
        grouped = " or ".join(name for name, one in ALGORITHMS.items() if one.grouped)
        raise JobError(f"nodes={nodes}: {algorithm} treats all ranks alike; leave it out, or write algorithm {grouped}")
    if nodes is not None and (nodes < 1 or ranks % nodes):
        fits = ", ".join(str(k) for k in range(1, ranks + 1) if ranks % k == 0)
        raise JobError(f"nodes={nodes} does not divide {ranks} ranks; write one of {fits}")
    along_trees = way.trees and not (collective == "all_reduce" and way.owners) and COLLECTIVES[collective].parts == "one"
    if pieces is not None and not along_trees:
        raise JobError(f"pieces={pieces}: {algorithm} {collective} cuts the data by itself; leave it out")
    if pieces is not None and pieces < 1:
        raise JobError(f"pieces={pieces} is not possible; write 1 or more")
    return way


def _squarest(ranks: int) -> int:
    """The largest divisor that is not above the square root."""
    return next(k for k in range(int(ranks**0.5), 0, -1) if ranks % k == 0)
