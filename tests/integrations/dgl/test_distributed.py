"""Pulls of DistDGL, packed: two servers in the role of two machines, and one client.

Servers and client are processes of their own, as in DGL's own tests. The client runs all checks in
one session, because DGL takes some ten seconds to connect; each check is a test here.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DGLBACKEND", "pytorch")  # the spawned processes know no conftest

import numpy as np
import pytest
import torch

pytest.importorskip("dgl", reason="dgl is not installed")

import bitslab
from tests.helpers import random_bits, same_bits, take

pytestmark = pytest.mark.xdist_group("distdgl")

LOCAL_ROWS, ROWS = 60, 200  # rows on the client's machine, and on both
TIMEOUT_SECONDS = 120


def make_tensors() -> dict[str, torch.Tensor]:
    """Make the servers' tensors, the same in every process. (DGL has no bool or bfloat16.)"""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randn(ROWS, 64, generator=generator).round()
    odd = counts.clone()
    odd[1::7, 3] = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    odd[2::5, 9] = -0.0
    return {
        "float32": odd,
        "float64": counts.double().view(ROWS, 4, 16),
        "float16": counts.half(),
        "int64": counts.abs().long(),
        "labels": torch.randint(5, (ROWS,), generator=generator),
        "uint8": (counts > 1).byte(),
        "noise": random_bits(torch.float32, (ROWS, 64)),
        "pushed": counts.clone(),
        "deleted": counts.clone(),
    }


PACKED = ["float32", "float64", "float16", "int64", "uint8"]


def make_policy(part: int) -> Any:
    """Assign the first rows to machine 0 and the others to machine 1."""
    from dgl.distributed.graph_partition_book import NodePartitionPolicy, RangePartitionBook

    nodes = np.array([[0, LOCAL_ROWS], [LOCAL_ROWS, ROWS]])
    edge = ("_N", "_E", "_N")
    edges = {edge: np.array([[0, 1], [1, 2]])}
    book = RangePartitionBook(part, 2, {"_N": nodes}, edges, {"_N": 0}, {edge: 0})
    return NodePartitionPolicy(book)


def store_name(tag: str, name: str) -> str:
    # Names are those of files in /dev/shm: several runs may go on at once.
    return f"node~_N~{name}{tag}"


def serve(part: int, ip_config: str, tag: str, all_there: Any) -> None:
    warnings.simplefilter("ignore")
    from dgl.distributed import kvstore
    from dgl.distributed.rpc_server import start_server
    from dgl.distributed.server_state import ServerState

    # Two machines have two memories; these two processes have one /dev/shm.
    in_shared_memory = kvstore.empty_shared_mem
    kvstore.empty_shared_mem = lambda name, *rest: in_shared_memory(f"{name}{part or ''}", *rest)
    server = kvstore.KVServer(part, ip_config, 1, 1)
    server.add_part_policy(make_policy(part))
    mine = slice(0, LOCAL_ROWS) if part == 0 else slice(LOCAL_ROWS, ROWS)
    for name, t in make_tensors().items():
        server.init_data(store_name(tag, name), make_policy(part).policy_str, t[mine])
    all_there.wait(TIMEOUT_SECONDS)
    start_server(part, ip_config, 1, 1, ServerState(server, None, None))


class Session:
    """Objects for the checks in the client process."""

    def __init__(self, client: Any, ip_config: str, tag: str) -> None:
        self.client = client
        self.ip_config = ip_config
        self.tag = tag
        self.tensors = make_tensors()
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(ROWS, (150,), generator=generator)
        self.remote_rows = int((self.ids >= LOCAL_ROWS).sum())

    def name(self, name: str) -> str:
        return store_name(self.tag, name)

    def pulled(self, name: str) -> torch.Tensor:
        rows: torch.Tensor = self.client.pull(self.name(name), self.ids)
        return rows

    def right(self, name: str, rows: torch.Tensor) -> bool:
        return same_bits(rows, take(self.tensors[name], self.ids))


def run_checks(ip_config: str, tag: str, all_there: Any, outcomes: Any) -> None:
    warnings.simplefilter("ignore")
    import dgl.distributed
    from dgl.distributed import kvstore

    all_there.wait(TIMEOUT_SECONDS)
    time.sleep(0.5)  # a client that finds no server sleeps for longer before it tries again
    os.environ["DGL_DIST_MODE"] = "distributed"
    dgl.distributed.initialize(ip_config)
    client = kvstore.get_kvstore()
    client.map_shared_data(make_policy(0).partition_book)
    session = Session(client, ip_config, tag)
    results = {}
    for check in CHECKS:
        try:
            check(session)
            results[check.__name__] = ""
        except BaseException:
            results[check.__name__] = traceback.format_exc()
    outcomes.put(results)
    dgl.distributed.exit_client()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run the session; return the traceback of each check, empty where it passed."""
    ip_config: Path = tmp_path_factory.mktemp("distdgl") / "ip_config.txt"
    sockets = [socket.socket() for _ in range(2)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ip_config.write_text("".join(f"127.0.0.1 {s.getsockname()[1]}\n" for s in sockets))
    for s in sockets:
        s.close()
    # Forked from a process that has loaded what takes seconds to load, and that runs no threads.
    processes_of = multiprocessing.get_context("forkserver")
    processes_of.set_forkserver_preload(["bitslab.integrations.dgl.distributed", __name__])
    results, all_there = processes_of.Queue(), processes_of.Barrier(3)
    tag = f"-{os.getpid()}"
    given = (str(ip_config), tag, all_there)
    processes = [
        processes_of.Process(target=serve, args=(part, *given), daemon=True) for part in (0, 1)
    ]
    processes.append(processes_of.Process(target=run_checks, args=(*given, results), daemon=True))
    for process in processes:
        process.start()
    try:
        found = None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while found is None and time.monotonic() < deadline:
            try:
                found = results.get(timeout=0.5)
            except queue.Empty:
                codes = [process.exitcode for process in processes]
                assert not any(codes), f"exit codes of servers 0 and 1 and the client: {codes}"
        assert found is not None, f"the client said nothing within {TIMEOUT_SECONDS} s"
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        yield found
    finally:
        for process in processes:
            process.kill()
            process.join()
        results.close()


# In the client's process


def rows_come_back_bit_for_bit(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    for name in [*PACKED, "labels"]:
        pulls = compress_pulls(session.client, session.name(name))
        assert session.right(name, session.pulled(name)), name
        stats = pulls.stats()
        if name in PACKED:
            row_bytes = session.tensors[name][0].nbytes
            assert stats["rows"] == session.remote_rows, name
            assert stats["raw_bytes"] == session.remote_rows * row_bytes
            assert stats["moved_bytes"] < stats["raw_bytes"], (name, stats)
            assert stats["ratio"] > 1 and stats["replies"] == 1 and stats["raw_replies"] == 0
            assert stats["pack_seconds"] > 0 and stats["unpack_seconds"] > 0
            assert stats["gains_below_gb_per_s"] > 0
        pulls.detach()
        assert session.right(name, session.pulled(name)), name


def fewer_bytes_arrive(session: Session) -> None:
    from dgl.distributed import rpc

    from bitslab.integrations.dgl.distributed import compress_pulls

    arrived: list[int] = []
    unpack = rpc.deserialize_from_payload

    def counting(cls: Any, data: Any, tensors: Any) -> Any:
        arrived.append(len(data) + sum(t.nbytes for t in tensors))
        return unpack(cls, data, tensors)

    pulls = compress_pulls(session.client, session.name("float32"))
    rpc.deserialize_from_payload = counting
    try:
        session.pulled("float32")
    finally:
        rpc.deserialize_from_payload = unpack
    stats = pulls.stats()
    pulls.detach()
    assert len(arrived) == 1
    assert stats["moved_bytes"] <= arrived[0] < stats["moved_bytes"] + 1000
    assert arrived[0] < stats["raw_bytes"] / 2


def pushed_rows_are_never_stale(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    key, expected = session.name("pushed"), session.tensors["pushed"]
    pulls = compress_pulls(session.client, key)
    assert session.right("pushed", session.pulled("pushed"))
    # To the other machine, which is report; and to this one, through shared memory.
    ids = torch.tensor([LOCAL_ROWS + 3, ROWS - 1, 0, 5])
    rows = torch.arange(4 * 64).view(4, 64).float()
    expected[ids] = rows
    session.client.push(key, ids, rows)
    assert session.right("pushed", session.pulled("pushed"))
    assert same_bits(session.client.pull(key, ids), rows)
    pulls.detach()


def rows_that_do_not_shrink_go_raw(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    codec = bitslab.InvariantCodec.fit(session.tensors["float32"])
    pulls = compress_pulls(session.client, session.name("noise"), codec=codec)
    assert session.right("noise", session.pulled("noise"))
    stats = pulls.stats()
    assert stats["raw_replies"] == stats["replies"] == 1
    assert stats["moved_bytes"] == stats["raw_bytes"]
    assert stats["gains_below_gb_per_s"] == 0
    pulls.detach()


def a_tensor_that_gains_nothing_is_left_alone(session: Session) -> None:
    from dgl.distributed.kvstore import default_pull_handler

    from bitslab.integrations.dgl.distributed import compress_pulls

    pulls = compress_pulls(session.client, session.name("noise"))
    assert session.client._pull_handlers[session.name("noise")] is default_pull_handler
    assert session.right("noise", session.pulled("noise"))
    stats = pulls.stats()
    assert stats["codec"] == "raw" and stats["replies"] == 0
    assert "smaller" in stats["notes"][0]
    pulls.detach()


def packing_stops_where_the_network_is_faster(session: Session) -> None:
    from dgl.distributed.kvstore import default_pull_handler

    from bitslab.integrations.dgl.distributed import MEASURED_REPLIES, compress_pulls

    key = session.name("float32")
    pulls = compress_pulls(session.client, key, link_gb_per_s=1e9)
    for _ in range(MEASURED_REPLIES + 3):
        assert session.right("float32", session.pulled("float32"))
    stats = pulls.stats()
    assert stats["replies"] == MEASURED_REPLIES
    assert len(stats["notes"]) == 1 and "1e+09" in stats["notes"][0]
    assert session.client._pull_handlers[key] is default_pull_handler
    pulls.detach()
    slow = compress_pulls(session.client, key, link_gb_per_s=1e-9)
    for _ in range(MEASURED_REPLIES + 3):
        session.pulled("float32")
    assert slow.stats()["replies"] == MEASURED_REPLIES + 3
    slow.detach()


def others_get_what_they_got_before(session: Session) -> None:
    from dgl.distributed import kvstore, rpc

    from bitslab.integrations.dgl.distributed import compress_pulls

    key = session.name("float32")
    pulls = compress_pulls(session.client, key)
    other = kvstore.KVClient(session.ip_config, 1)
    other.map_shared_data(make_policy(0).partition_book)
    assert session.right("float32", other.pull(key, session.ids))  # by DGL's C++
    remote = session.ids[session.ids >= LOCAL_ROWS]
    rpc.send_request_to_machine(1, kvstore.PullRequest(key, remote))
    reply = rpc.recv_response()
    assert same_bits(reply.data_tensor, take(session.tensors["float32"], remote))
    assert pulls.stats()["replies"] == 0
    pulls.detach()


def handlers_of_the_user_are_kept(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    key = session.name("float16")
    session.client.register_pull_handler(key, doubled)
    expected = session.tensors["float16"][session.ids] * 2
    pulls = compress_pulls(session.client, key)
    assert same_bits(session.pulled("float16"), expected)
    assert pulls.stats()["rows"] == session.remote_rows
    pulls.detach()
    assert session.client._pull_handlers[key] is doubled
    assert same_bits(session.pulled("float16"), expected)


def doubled(data_store: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = data_store[name][ids] * 2
    return rows


def distributed_tensors_are_accepted(session: Session) -> None:
    from dgl.distributed import DistTensor

    from bitslab.integrations.dgl.distributed import compress_pulls

    whole = session.tensors["float64"]
    tensor = DistTensor(
        tuple(whole.shape), whole.dtype, f"float64{session.tag}", persistent=True, attach=False
    )
    assert tensor.kvstore_key == session.name("float64")
    pulls = compress_pulls(tensor, clusters=2)
    assert session.right("float64", tensor[session.ids])
    assert pulls.stats()["rows"] == session.remote_rows
    assert tensor[torch.empty(0, dtype=torch.int64)].shape == (0, 4, 16)
    assert same_bits(tensor[[ROWS - 1]], whole[-1:])
    assert same_bits(tensor[torch.arange(3)], whole[:3])  # all of it on this machine
    with pytest.raises(bitslab.ArgumentTypeError, match="together with a DistTensor"):
        compress_pulls(tensor, "float64")
    pulls.detach()


def names_are_checked(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    for name in ("no such tensor", None):
        with pytest.raises(bitslab.ArgumentError, match=rf"{name!r}.*{session.name('uint8')}"):
            compress_pulls(session.client, name)
    pulls = compress_pulls(session.client, session.name("uint8"))
    with pytest.raises(bitslab.ArgumentError, match="compressed already"):
        compress_pulls(session.client, session.name("uint8"))
    pulls.detach()


def detaching_restores_everything(session: Session) -> None:
    from dgl.distributed.kvstore import default_pull_handler

    from bitslab.integrations.dgl import distributed

    before = dict(vars(session.client))
    handlers = dict(session.client._pull_handlers)
    names = [session.name("float32"), session.name("uint8")]
    first, second = [distributed.compress_pulls(session.client, name) for name in names]
    assert "pull" in vars(session.client)
    first.detach()
    first.detach()
    assert "pull" in vars(session.client)
    again = distributed.compress_pulls(session.client, names[0])
    first.detach()  # must not undo what another one did
    assert session.right("float32", session.pulled("float32"))
    assert again.stats()["replies"] == 1
    again.detach()
    second.detach()
    assert vars(session.client) == before
    assert session.client._pull_handlers == handlers
    assert session.client._pull_handlers[names[0]] is default_pull_handler
    assert not distributed._forms
    assert session.right("float32", session.pulled("float32"))


def a_deleted_tensor_can_be_detached(session: Session) -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    pulls = compress_pulls(session.client, session.name("deleted"))
    session.client.delete_data(session.name("deleted"))
    pulls.detach()
    assert "pull" not in vars(session.client)


CHECKS: list[Callable[[Session], None]] = [
    rows_come_back_bit_for_bit,
    fewer_bytes_arrive,
    pushed_rows_are_never_stale,
    rows_that_do_not_shrink_go_raw,
    a_tensor_that_gains_nothing_is_left_alone,
    packing_stops_where_the_network_is_faster,
    others_get_what_they_got_before,
    handlers_of_the_user_are_kept,
    distributed_tensors_are_accepted,
    names_are_checked,
    detaching_restores_everything,
    a_deleted_tensor_can_be_detached,
]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_session(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


# Without servers


def test_standalone_clients_go_on_as_before() -> None:
    from dgl.distributed.kvstore import SA_KVClient

    from bitslab.integrations.dgl.distributed import compress_pulls

    client = SA_KVClient()
    t = torch.randn(50, 8)
    client.add_data("feat", t, make_policy(0))
    pulls = compress_pulls(client, "feat")
    ids = torch.tensor([3, 1, 49])
    assert same_bits(client.pull("feat", ids), t[ids])
    assert "standalone" in pulls.stats()["notes"][0]
    assert pulls.stats()["rows"] == 0
    with pytest.raises(bitslab.ArgumentError, match="compressed already"):
        compress_pulls(client, "feat")
    pulls.detach()
    assert "pull" not in vars(client)
    with pytest.raises(bitslab.ArgumentError, match="link_gb_per_s: 0"):
        compress_pulls(client, "feat", link_gb_per_s=0)


def test_other_stores_are_refused() -> None:
    from bitslab.integrations.dgl.distributed import compress_pulls

    with pytest.raises(bitslab.ArgumentTypeError, match="got dict"):
        compress_pulls({}, "feat")


def make_handler() -> tuple[Any, torch.Tensor]:
    from dgl.distributed.kvstore import default_pull_handler

    from bitslab.integrations.dgl.distributed import PackingHandler

    rows = torch.randn(40, 32).round()
    codec = bitslab.InvariantCodec.fit(rows)
    return PackingHandler(default_pull_handler, "feat/test", codec), rows


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from bitslab.integrations.dgl import distributed

    found: dict[str, Any] = {}
    monkeypatch.setattr(distributed, "_forms", found)
    return found


def test_handlers_equal_dgls_own(forms: dict[str, Any]) -> None:
    # What DGL's backup servers assert when another client maps the shared data.
    from dgl.distributed.kvstore import default_pull_handler, default_push_handler

    handler, _ = make_handler()
    there = pickle.loads(pickle.dumps(handler))
    assert there == default_pull_handler and default_pull_handler == there
    assert there == handler and hash(there) == hash(handler)
    assert there != default_push_handler


def test_servers_answer_in_raw_what_they_cannot_pack(forms: dict[str, Any]) -> None:
    from bitslab.integrations.dgl.distributed import _WantedName

    handler, rows = make_handler()
    ids = torch.tensor([1, 5])
    asked = pickle.loads(pickle.dumps(_WantedName("feat", "feat/test")))
    assert torch.equal(handler({"feat": rows}, asked, ids), rows[ids])  # not registered
    pickle.loads(pickle.dumps(handler))
    assert not isinstance(handler({"feat": rows}, asked, ids), torch.Tensor)
    # The name was given to a tensor of another dtype or shape since.
    assert same_bits(handler({"feat": rows.half()}, asked, ids), rows.half()[ids])
    assert same_bits(handler({"feat": rows[:, :16]}, asked, ids), rows[ids, :16])


def test_a_handler_of_another_version_packs_nothing(forms: dict[str, Any]) -> None:
    from bitslab.integrations.dgl.distributed import PackingHandler

    handler, rows = make_handler()
    newer: Any = PackingHandler.__new__(PackingHandler)
    newer.__setstate__((99, handler.inner, "of another", "kind"))
    assert same_bits(newer({"feat": rows}, "feat", torch.tensor([2])), rows[2:3])
    assert not forms


def test_replies_are_checked(forms: dict[str, Any]) -> None:
    from bitslab.integrations.dgl.distributed import _WantedName

    handler, rows = make_handler()
    pickle.loads(pickle.dumps(handler))
    asked = pickle.loads(pickle.dumps(_WantedName("feat", "feat/test")))
    ids = torch.arange(40)
    reply = handler({"feat": rows}, asked, ids)
    assert same_bits(pickle.loads(pickle.dumps(reply)), rows)
    reply._packed.parts["lengths"][3] += 1
    with pytest.raises(bitslab.CorruptedDataError):
        pickle.loads(pickle.dumps(reply))
    forms.clear()
    with pytest.raises(bitslab.BitslabError, match="did not ask"):
        pickle.loads(pickle.dumps(reply))
