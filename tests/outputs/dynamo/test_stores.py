"""Tests for Dynamo's discovery records in files and in etcd.

kvbus and Dynamo find a record until the process that wrote it has ended.
"""

from __future__ import annotations

import os
import time

import pytest

from kvbus.parts.outputs.dynamo.registry import OLD, SOURCES, EtcdStore, FileStore, Scope, records
from tests.outputs.dynamo.etcd_double import Etcd

RECORDS = records(Scope("dyn-amo", "back_end", "generate"), 0x2F, 7, 1, "tcp://10.0.0.1:5857")
PREFIX = f"{SOURCES}/namespace/dyn-amo/component/back_end/"


@pytest.fixture(params=["files", "etcd"])
def store(request, tmp_path):
    if request.param == "files":
        yield FileStore(tmp_path)
        return
    with Etcd() as etcd:
        yield EtcdStore(etcd.url)


def test_a_stored_record_is_found_until_it_is_deleted(store):
    assert store.find(PREFIX) == {}
    for _ in range(2):
        store.put(RECORDS)
        (found,) = store.find(PREFIX).items()
        assert found in RECORDS.items()
    store.put(dict.fromkeys(RECORDS, b"new"))
    assert list(store.find(PREFIX).values()) == [b"new"]
    assert store.find(f"{SOURCES}/namespace/dyn-amo/component/back/") == {}
    store.delete(RECORDS)
    store.delete(RECORDS)
    assert store.find(PREFIX) == {}
    store.close()


def test_files_have_the_names_of_dynamo(tmp_path):
    FileStore(tmp_path).put(RECORDS)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    path = "namespace%2Fdyn%2Damo%2Fcomponent%2Fback%5Fend%2Fendpoint%2Fgenerate%2Ftopic%2Fkv%2Devents%2F2f"
    assert names == {f"v1/event_sources/{path}", f"v1/event_channels/{path}"}


def test_a_record_file_expires_unless_it_is_stored_again(tmp_path):
    store = FileStore(tmp_path)
    store.put(RECORDS)
    for path in tmp_path.rglob("*2f"):
        os.utime(path, (0, time.time() - OLD))
    assert store.find(PREFIX) == {}
    store.put(RECORDS)
    assert len(store.find(PREFIX)) == 1


@pytest.mark.parametrize(
    "harm",
    [
        lambda keys, path: keys.pop(path),
        lambda keys, path: keys.update({path: (b"other", keys[path][1])}),
        lambda keys, path: keys.update({path: (keys[path][0], "")}),
    ],
    ids=["deleted", "another value", "no lease"],
)
def test_a_record_taken_by_another_process_is_stored_again(harm):
    gone: list[str] = []
    with Etcd() as etcd:
        store = EtcdStore(etcd.url, gone.append)
        store.put(RECORDS)
        before, (path, *_) = dict(etcd.keys), [path for path in etcd.keys if path.startswith(PREFIX.encode())]
        harm(etcd.keys, path)
        store.find(PREFIX)
        store.put(RECORDS)
        store.find(PREFIX)
        assert (gone, etcd.keys, etcd.leases) == ([path.decode()], before, ["1"])


def test_a_deleted_or_expired_record_does_not_count_as_taken():
    gone: list[str] = []
    with Etcd() as etcd:
        store = EtcdStore(etcd.url, gone.append)
        store.put(RECORDS)
        etcd.expire("1")
        assert store.find(PREFIX) == {}
        store.put(RECORDS)
        assert len(store.find(PREFIX)) == 1
        store.delete(RECORDS)
        assert store.find(PREFIX) == {}
        store.put({})
        assert gone == []


def test_only_an_expired_lease_is_replaced():
    with Etcd() as etcd:
        store = EtcdStore(etcd.url)
        store.put(RECORDS)
        etcd.keys.clear()
        store.put(RECORDS)
        assert (etcd.leases, etcd.keys) == (["1"], {}), "only the lease was kept"
        etcd.expire("1")
        store.put(RECORDS)
        assert len(store.find(PREFIX)) == len(etcd.leases) == 1
        store.close()
        assert (etcd.leases, etcd.keys) == ([], {})
        store.close()


@pytest.mark.parametrize("says", [b"<html></html>", b"", b"[]", b"[" * 60_000, b"{}"])
def test_a_malformed_answer_of_etcd_is_an_error_and_is_retried(says):
    with Etcd() as etcd:
        store = EtcdStore(etcd.url)
        etcd.says = says
        with pytest.raises(OSError, match=r"etcd('s answer to lease/grant is not a JSON object| grants no lease)"):
            store.put(RECORDS)
        etcd.says = None
        store.put(RECORDS)
        assert len(store.find(PREFIX)) == 1


def test_an_unavailable_etcd_is_an_error_with_its_cause():
    with Etcd() as etcd:
        etcd.fails = True
        with pytest.raises(OSError, match="etcd answers 503 to kv/range"):
            EtcdStore(etcd.url).find(PREFIX)
    with pytest.raises(OSError, match="refused"):
        EtcdStore(etcd.url).put(RECORDS)
