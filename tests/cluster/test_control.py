"""Changes to a server's engines: what they mean, which are refused, and how they are asked for."""

import asyncio
import socket
from dataclasses import replace as replaced

import pytest

from forge import LLM
from forge.cluster import ray_address
from forge.cluster.control import (
    Change,
    Deployment,
    ask_for_change,
    changed,
    check_interface,
    interface_of,
    listen_for_changes,
    version_of,
)
from forge.cluster.launch import KeeperProcess
from forge.cluster.options import ClusterOptions
from forge.cluster.ray_address import take_lock
from forge.errors import ForgeError, UsageError
from forge.server.engine_process import ready_message
from forge.server.messages import received

APART = ClusterOptions(prefill_replicas=1, decode_replicas=2)


def deployment(cluster: ClusterOptions) -> Deployment:
    return Deployment("one", "tales", {"threads": 1}, cluster)


def test_a_change_is_of_the_engines_that_answer_and_of_what_it_names_only():
    assert changed(deployment(ClusterOptions(replicas=2)), Change(replicas=3)).cluster.answering == 3
    apart = changed(deployment(APART), Change(4, "b.gguf"))
    assert (apart.cluster.decode_replicas, apart.cluster.prefill_replicas, apart.model) == (4, 1, "b.gguf")
    assert apart.name == "one" and changed(apart, Change()) == apart


@pytest.mark.parametrize(("replicas", "message"), [(0, "must be at least 1"), (9, "--max-replicas 4 is less than")])
def test_a_change_without_a_meaning_is_refused(replicas: int, message: str):
    with pytest.raises(UsageError, match=message):
        changed(deployment(ClusterOptions(replicas=2, max_replicas=4)), Change(replicas))


def test_a_version_is_that_of_the_file_and_of_the_options(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"one")
    first = version_of(str(path), {"kv": "prefix"})
    assert version_of(str(path), {"kv": "prefix"}) == first
    assert version_of(str(path), {"kv": "paged"}) != first
    path.write_bytes(b"other")
    assert version_of(str(path), {"kv": "prefix"}) != first


def test_a_model_that_looks_otherwise_to_a_front_is_refused_with_what_differs():
    ready = ready_message(LLM("hash", kv="prefix", threads=1))
    known = interface_of(ready)
    elsewhere = replaced(ready.tokenizer_spec, key_prefix="/another/file: ")
    check_interface(known, ready._replace(load_seconds=9.0, num_blocks=3, tokenizer_spec=elsewhere))
    other = replaced(ready.tokenizer_spec, tokens=(*ready.tokenizer_spec.tokens[:-1], "other"))
    with pytest.raises(UsageError, match="the new model has another tokenizer and another context: start a server"):
        check_interface(known, ready._replace(max_model_len=1, tokenizer_spec=other))


def test_changes_are_made_one_at_a_time_and_a_refusal_reaches_who_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_address.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(UsageError, match="no server called one runs on this machine"):
        ask_for_change("one", Change(2))
    take_lock("one")
    made, busy = [], []

    async def make(change: Change) -> None:
        assert not busy
        busy.append(change)
        await asyncio.sleep(0)
        busy.clear()
        if change.replicas == 3:
            raise ForgeError("no engine has started for 5 s")
        made.append(change)

    async def run() -> list[BaseException | None]:
        async with await listen_for_changes("one", make):
            asked = [asyncio.to_thread(ask_for_change, "one", Change(number, "a.gguf")) for number in (2, 3, 4)]
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)

    results = asyncio.run(run())
    assert sorted(made) == [Change(2, "a.gguf"), Change(4, "a.gguf")]
    assert [str(result) for result in results] == ["None", "no engine has started for 5 s", "None"]
    assert results[1].exit_code == ForgeError.exit_code


def test_a_change_that_a_keeper_does_not_live_to_read_is_refused():
    async def ask() -> None:
        keeper = KeeperProcess.__new__(KeeperProcess)  # without a process
        keeper._socket, theirs = socket.socketpair()
        queue = await keeper.messages()
        keeper.send(deployment(APART))
        plan = await asyncio.to_thread(next, received(theirs))
        assert plan == deployment(APART)
        theirs.close()
        assert await queue.get() is None
        with pytest.raises(ForgeError, match="has ended: try again"):
            keeper.send(plan)

    asyncio.run(ask())
