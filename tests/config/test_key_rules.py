"""Tests for configurations whose CURVE keys or state settings are incomplete or have no effect."""

from __future__ import annotations

import pytest

from kvbus.config import parts
from tests.config.texts import text_of

SECRET, SERVER, CLIENTS = "curve_secret_key_file: /s", "curve_server_key_file: /p", "curve_client_keys: /c"


def test_a_complete_set_of_curve_keys_is_accepted(read):
    source = f"{{endpoint: 'ipc:///a', {SECRET}, {SERVER}}}"
    output = f"{{endpoint: 'ipc:///o', replay_endpoint: 'ipc:///r', bind: false, {SECRET}, {SERVER}, {CLIENTS}}}"
    config = read(text_of(f"[{source}]", f"[{output}]"))
    assert str(config.outputs[0].curve_client_keys) == "/c"


@pytest.mark.parametrize("section", ["sources", "outputs"])
def test_curve_keys_of_a_bound_endpoint_need_libsodium(monkeypatch, problems, section):
    binding = f"[{{bind: true, endpoint: 'tcp://*:7000', {SECRET}, {CLIENTS}}}]"
    text = text_of(binding, "[{}]") if section == "sources" else text_of("[{}]", binding)
    monkeypatch.setattr(parts, "has_libsodium", lambda: False)
    found = problems(text)
    assert set(found) == {f"{section}[0].curve_secret_key_file"}
    assert "need libsodium, which is not installed; for example pip install 'kvbus[curve]'" in str(found)
