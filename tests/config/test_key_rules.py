"""CURVE keys and keys of the state that are incomplete or of no use."""

from __future__ import annotations

import pytest

from kvbus.config import parts
from tests.config.texts import text_of

SECRET, SERVER, CLIENTS = "curve_secret_key_file: /s", "curve_server_key_file: /p", "curve_client_keys: /c"


@pytest.mark.parametrize(
    ("source", "key", "wrong"),
    [
        (SECRET, "curve_server_key_file", "needed with curve_secret_key_file, for what kvbus connects to"),
        (SERVER, "curve_secret_key_file", "needed too, with curve_server_key_file"),
        (f"{SECRET}, {SERVER}, {CLIENTS}", "curve_client_keys", "there is nothing here that kvbus binds"),
        (f"bind: true, {SECRET}", "curve_client_keys", "needed with curve_secret_key_file, for what kvbus binds"),
        (f"bind: true, {SECRET}, {CLIENTS}, {SERVER}", "curve_server_key_file", "nothing here that kvbus connects to"),
        (f"bind: true, replay_endpoint: 'ipc:///r', {SECRET}, {CLIENTS}", "curve_server_key_file", "needed with"),
    ],
)
def test_half_a_curve_of_a_source(problems, source, key, wrong):
    found = problems(text_of(f"[{{endpoint: 'ipc:///a', {source}}}]", "[{}]"))
    assert wrong in found[f"sources[0].{key}"]


@pytest.mark.parametrize(
    ("output", "key", "wrong"),
    [
        (SECRET, "curve_client_keys", "needed with curve_secret_key_file, for what kvbus binds"),
        (CLIENTS, "curve_secret_key_file", "needed too, with curve_client_keys"),
        (f"{SECRET}, {CLIENTS}, {SERVER}", "curve_server_key_file", "there is nothing here that kvbus connects to"),
        (f"bind: false, {SECRET}, {SERVER}, {CLIENTS}", "curve_client_keys", "there is nothing here that kvbus binds"),
        (f"bind: false, {SECRET}", "curve_server_key_file", "needed with"),
        (f"bind: false, replay_endpoint: 'ipc:///r', {SECRET}, {SERVER}", "curve_client_keys", "needed with"),
    ],
)
def test_half_a_curve_of_an_output(problems, output, key, wrong):
    found = problems(text_of("[{}]", f"[{{endpoint: 'ipc:///o', {output}}}]"))
    assert wrong in found[f"outputs[0].{key}"]


def test_a_whole_curve(read):
    source = f"{{endpoint: 'ipc:///a', {SECRET}, {SERVER}}}"
    output = f"{{endpoint: 'ipc:///o', replay_endpoint: 'ipc:///r', bind: false, {SECRET}, {SERVER}, {CLIENTS}}}"
    config = read(text_of(f"[{source}]", f"[{output}]"))
    assert str(config.outputs[0].curve_client_keys) == "/c"


@pytest.mark.parametrize("section", ["sources", "outputs"])
def test_keys_need_libsodium_where_kvbus_binds(monkeypatch, problems, section):
    binding = f"[{{bind: true, endpoint: 'tcp://*:7000', {SECRET}, {CLIENTS}}}]"
    text = text_of(binding, "[{}]") if section == "sources" else text_of("[{}]", binding)
    monkeypatch.setattr(parts, "has_libsodium", lambda: False)
    found = problems(text)
    assert set(found) == {f"{section}[0].curve_secret_key_file"}
    assert "need libsodium, which is not installed; for example pip install 'kvbus[curve]'" in str(found)
