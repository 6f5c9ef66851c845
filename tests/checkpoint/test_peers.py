"""States kept in each other's memory: where they go, that they are whole or not there, and what is left when a rank is killed."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from keeping import RANKS, Keeping, batches, engine_of
from torch.distributed import HashStore

from stretto.checkpoint.load import read_manifest, whole
from stretto.checkpoint.manifest import NAME
from stretto.checkpoint.parts import HostCopy, Part
from stretto.checkpoint.peers import Peers, PeerStore, keepers
from stretto.checkpoint.rescue import rescue
from stretto.checkpoint.save import Content
from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import LocalStore
from stretto.checkpoint.vault import Address, Held, Line, Vault
from stretto.comm.nodes import Nodes, Post
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import Damaged, JobError, PeerLost, RunError
from stretto.layout.layout import Box


@given(st.lists(st.integers(1, 4), min_size=1, max_size=7))
def test_every_rank_is_kept_by_another_and_on_another_machine_where_there_is_one(sizes):
    machines, at = [], 0
    for size in sizes:
        machines.append(tuple(range(at, at + size)))
        at += size
    found = keepers(machines)
    if at == 1:
        assert found == {}
        return
    where = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
    assert found.keys() == set(range(at)) and all(rank != keeper for rank, keeper in found.items())
    if len(machines) > 1:
        assert all(where[rank] != where[keeper] for rank, keeper in found.items())


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_pairs_survive_as_many_losses_of_two_machines_as_can_be(count):
    """Of n machines, any two lost: only a pair that keep each other take a state with them. REFERENCE J5: for 8 machines 0.857."""
    found = keepers([(rank,) for rank in range(count)])
    survived = [lost for lost in combinations(range(count), 2) if not any(found[a] in lost for a in lost)]
    pairs = len(list(combinations(range(count), 2)))
    lost = count // 2 + (2 if count % 2 else 0)  # a last group of three is a ring: any two of it take one's state with them
    assert len(survived) == pairs - lost
    if count == 8:
        assert len(survived) / pairs == pytest.approx(0.857, abs=1e-3)


def held(content=b"0123456789", about="x"):
    return Held(about, [memoryview(content[:4]), memoryview(content[4:])])


def test_a_vault_gives_any_bytes_of_the_newest_two_steps_to_who_knows_its_word():
    vault = Vault()
    for step in (1, 2, 3):
        vault.put(0, step, held())
    line = Line(vault.address, 5.0)
    assert sorted(line.ask(what="list")) == [[0, 2, 10], [0, 3, 10]] and line.ask(what="about", rank=0, step=3) == "x"
    for start, stop in ((0, 10), (2, 7), (4, 5), (9, 10)):
        into = bytearray(stop - start)
        line.ask(into=memoryview(into), what="get", rank=0, step=2, start=start, stop=stop)
        assert into == b"0123456789"[start:stop]
    with pytest.raises(PeerLost, match="it has None of 1 bytes"):
        line.ask(into=memoryview(bytearray(1)), what="get", rank=0, step=1, start=0, stop=1)
    with pytest.raises(PeerLost, match="out of reach"):
        Line(vault.address._replace(token="0" * 32), 5.0).ask(what="list")
    vault.close()


def talking():
    return [thread for thread in threading.enumerate() if thread.name == "stretto-vault"]


def test_a_state_of_which_not_all_arrives_leaves_the_one_before_it():
    vault = Vault()
    line = Line(vault.address, 5.0)
    line.ask([memoryview(b"whole")], what="put", rank=1, step=1, about="a", bytes=5)
    before = len(talking())
    half = socket.create_connection(vault.address[:2])
    half.sendall(vault.address.token.encode() + b'{"what": "put", "rank": 1, "step": 2, "about": "b", "bytes": 5}\nhal')
    half.close()
    deadline = time.monotonic() + 5
    while len(talking()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert line.ask(what="list") == [[1, 1, 5]]
    vault.close()


def parts(rank, value, copies=2):
    """Half of a vector of eight each."""
    return [Part("model/w", (8,), (Box((4 * rank,), (4,)),), torch.full((4,), float(value)), (0, 4))]


def kept(peers, rank, step, value):
    content = Content(step, "dp=2", 2, state={"steps": step}, notes={"value": value})
    peers.keep(peers.take(step, parts(rank, value), pinned=False), content)


def two():
    board = HashStore()
    return [Peers(board, rank, [(0,), (1,)], patience=5.0) for rank in (0, 1)]


def test_two_ranks_have_the_same_step_at_any_moment_and_read_it_as_a_checkpoint():
    both = two()
    kept(both[0], 0, 1, 10)
    store = PeerStore([both[0].vault.address])
    assert store.folders() == [name_of(1)] and not store.complete(name_of(1)) and Shelf(store).steps() == []
    for rank, step in ((1, 1), (0, 2), (1, 2)):
        kept(both[rank], rank, step, 10 * step)
    for alive in both:  # either is enough
        store = PeerStore([alive.vault.address])
        assert (
            Shelf(store).steps() == [2, 1] and store.has(f"{name_of(2)}/{NAME}") and store.size(f"{name_of(2)}/rank-00001.safetensors") > 16
        )
        with store.open(f"{name_of(1)}/rank-00001.safetensors") as file:
            content = file.read()
        assert content == store.read(f"{name_of(1)}/rank-00001.safetensors") and content.endswith(torch.full((4,), 10.0).numpy().tobytes())
        with pytest.raises(RunError, match="cannot be written"):
            store.write("x", [])
        store.close()
    for rank in (0, 1):
        both[rank].close()


def test_the_older_copy_is_written_over_only_when_all_have_kept_the_newer():
    both = two()
    for peers in both:
        peers.patience = 0.2
    kept(both[0], 0, 1, 10)
    kept(both[1], 1, 1, 10)
    kept(both[0], 0, 2, 20)
    with pytest.raises(PeerLost, match="1 of 2 ranks have not kept step 2"):
        both[0].take(3, parts(0, 30), pinned=False)
    assert Shelf(PeerStore([both[0].vault.address])).steps() == [1]
    kept(both[1], 1, 2, 20)
    both[0].take(3, parts(0, 30), pinned=False)  # and it is not lost while the next is being copied
    assert Shelf(PeerStore([both[0].vault.address])).steps() == [2]


def test_a_neighbour_that_is_gone_is_told_and_ones_own_copy_is_there():
    both = two()
    for rank in (0, 1):
        kept(both[rank], rank, 1, 1)
    both[1].vault.close()
    both[0]._line.close()
    both[0]._line = None
    with pytest.raises(PeerLost, match="out of reach"):
        kept(both[0], 0, 2, 2)
    assert [0, 2] in [list(key) for key in both[0].vault.held]
    assert PeerStore([Address("127.0.0.1", 1, "0" * 32)], patience=1.0).folders() == []


def test_a_host_copy_that_no_longer_fits_is_made_anew():
    one = Peers(HashStore(), 0, [(0,)])
    for step, n in enumerate((4, 4, 6, 6)):
        host = one.take(step, [Part("model/w", (n,), (Box((0,), (n,)),), torch.ones(n), (0, n))], pinned=False)
        assert isinstance(host, HostCopy) and len(host.buffer) == 4 * n
        one.keep(host, Content(step, "dp=1", 1))
    assert one.placement == {} and sorted(one.vault.held) == [(0, 2), (0, 3)]


@pytest.mark.parametrize("lost", range(RANKS))
def test_after_a_rank_is_killed_its_state_is_read_from_its_neighbour_and_the_run_goes_on(lost, tmp_path):
    with Keeping(tmp_path) as ranks:
        addresses = ranks.all("address")
        losses = [ranks.all("train")[0] for _ in range(5)]
        state = ranks.all("state")[0]
        ranks.kill(lost)

        def go_on(world, step, mesh):
            store = PeerStore(addresses)
            engine = engine_of(world, seed=7, mesh=mesh)
            notes = engine.saver.load(store, name_of(step), ())
            now = {name: x.clone() for name, x in engine.full_state() if x is not None}
            return Shelf(store).steps(), notes, now, engine.steps, engine.step(batches()[engine.steps]).loss

        steps, notes, now, counted, _ = run_threads(lambda world: go_on(world, 5, "dp=2"), 2)[0]
        assert state.keys() == now.keys() and all((x == now[name].numpy()).all() for name, x in state.items())
        assert steps == [5, 4] and notes == {"loss": losses[4]} and counted == 5
        loss = run_threads(lambda world: go_on(world, 4, f"dp={RANKS}"), RANKS)[0][4]
        assert loss == losses[4]  # bitwise, on the same mesh
        other = (lost + 1) % RANKS
        ranks.kill(other)
        with pytest.raises((JobError, Damaged)):  # its neighbour's state went with it
            run_threads(lambda world: go_on(world, 5, "dp=1"), 1)


def test_on_several_machines_a_copy_goes_to_another_machine_at_its_address():
    board = HashStore()
    posts = [Post(0, "one", "127.0.0.2", 1), Post(1, "two", "127.0.0.3", 1)] * 2  # ranks 0 and 2, 1 and 3
    worlds = [replace(World.alone("cpu"), rank=rank, size=4, store=board, nodes=Nodes(rank, posts)) for rank in range(4)]
    peers = [Peers.of(world) for world in worlds]
    assert all(posts[rank].node != posts[kept].node for rank, kept in peers[0].placement.items()) and len(peers[0].placement) == 4
    assert [one.vault.address.host for one in peers] == ["127.0.0.2", "127.0.0.3"] * 2
    for one in peers:
        one.close()
    (alone,) = {tuple(Peers.of(replace(world, nodes=None, store=HashStore())).placement.items()) for world in worlds}
    assert dict(alone) == keepers([(0,), (1,), (2,), (3,)])


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_whoever_is_left_saves_the_newest_step_of_which_all_is_held_once(lost, tmp_path):
    board = HashStore()
    made = [Peers(board, rank, [(0,), (1,), (2,)], patience=5.0) for rank in range(3)]
    third = lambda rank, value: [Part("model/w", (12,), (Box((4 * rank,), (4,)),), torch.full((4,), float(value)), (0, 4))]
    for step in (1, 2):
        for rank in range(3):
            content = Content(step, "dp=3", 3, state={"steps": step})
            made[rank].keep(made[rank].take(step, third(rank, step + 10 * rank), pinned=False), content)
    addresses = made[0].addresses(range(3))
    made[lost].vault.close()
    made[lost].vault.held.clear()
    shelf = Shelf(LocalStore(tmp_path / "c"))
    found = {}

    def of_rank(rank):
        found[rank] = rescue(made[rank].vault, rank, addresses, shelf, patience=10.0)

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(3) if rank != lost]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found.values()) == {2} and shelf.steps() == [2] and os.listdir(tmp_path / "c") == [name_of(2)]
    manifest = read_manifest(shelf.store, name_of(2))
    value = whole(shelf.store, name_of(2), manifest, "model/w")
    assert value.tolist() == [2.0] * 4 + [12.0] * 4 + [22.0] * 4
    first = min(found)
    again = Peers(HashStore(), first, [(first,)])
    assert rescue(again.vault, 0, [again.vault.address], shelf) is None  # nothing newer is held


def test_where_the_disk_is_full_the_others_are_told_that_nothing_was_saved(tmp_path, monkeypatch):
    peers = Peers(HashStore(), 0, [(0,)])
    kept(peers, 0, 1, 1)
    monkeypatch.setattr(LocalStore, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert rescue(peers.vault, 0, [peers.vault.address], Shelf(LocalStore(tmp_path))) is None
    line = Line(peers.vault.address, 5.0)
    assert line.ask(what="rescued") is None
