"""Tests for files with CURVE keys: every valid form is read, and a secret key that other users may read is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq.auth
from click.testing import CliRunner

from kvbus.cli import main
from kvbus.common.errors import ConfigError
from kvbus.config import load
from kvbus.daemon.keys import in_clear, read_keys
from kvbus.transport.curve import (
    MAX_FILE_BYTES,
    KeyFileError,
    certificate,
    client_keys,
    generate,
    read_allowed,
    read_public,
    read_secret,
)
from tests.security.keys import Keyring, Pair


def private(path, text):
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def key_with(char: str) -> str:
    """Return a random public key whose text contains a given character. About a third of all keys contain it."""
    return next(public for public in (generate()[0].decode() for _ in range(1000)) if char in public)


def test_kvbus_and_zmq_auth_read_the_key_files_of_each_other(tmp_path):
    ours = Pair(tmp_path, "ours")
    assert zmq.auth.load_certificate(ours.secret_file) == (ours.public, ours.secret)
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "theirs", metadata={"name": "router a"})
    Path(secret_file).chmod(0o600)
    public, secret = zmq.auth.load_certificate(secret_file)
    assert read_secret(tmp_path / "theirs.key_secret") == (public, secret)
    assert read_public(tmp_path / "theirs.key") == public
    assert zmq.auth.load_certificate(public_file)[0] == public


def test_the_error_names_a_public_key_in_place_of_a_secret_key(tmp_path):
    public, _ = generate()
    file = tmp_path / "ours.key"
    file.write_text(certificate(public))
    file.chmod(0o644)
    with pytest.raises(KeyFileError, match="holds no secret key, only a public key"):
        read_secret(file)
    assert (
        "holds no secret key, only a public key"
        in CliRunner().invoke(main, ["keygen", "--public-of", str(file)]).stderr
    )


def test_a_file_with_only_a_key_is_accepted(tmp_path):
    public, secret = generate()
    assert read_secret(private(tmp_path / "secret", f"{secret.decode()}\n")) == (public, secret)
    assert read_public(private(tmp_path / "public", f"# of a router\n{public.decode()}")) == public


def test_a_key_may_contain_hash_and_equals_signs(tmp_path):
    assert read_public(private(tmp_path / "odd", key_with("="))) == read_public(tmp_path / "odd")
    public = key_with("#")
    assert read_public(private(tmp_path / "bare", f"# a comment\n{public}\n{'#' * 40}\n")) == public.encode()
    assert len(read_allowed(private(tmp_path / "list", f"{public} router\n#\n"))) == 1


def test_an_allow_list_may_be_a_file_or_a_directory(tmp_path):
    keys = [generate()[0] for _ in range(3)]
    listed = tmp_path / "list"
    listed.write_text(f"# routers\n{keys[0].decode()} a\n\n  {keys[1].decode()}\tb # old\n{keys[2].decode()}\n")
    directory = tmp_path / "keys"
    directory.mkdir()
    for n, key in enumerate(keys):
        (directory / f"{n}.key").write_text(certificate(key) if n else key.decode())
    (directory / ".hidden").write_text("nothing")
    assert read_allowed(listed).keys() == read_allowed(directory).keys()
    assert [[each.name for each in read_allowed(path).values()] for path in (listed, directory)] == [
        ["a", "b", ""],
        ["0", "1", "2"],
    ]
    (tmp_path / "empty").touch()
    assert read_allowed(tmp_path / "empty") == {}


def test_keys_of_a_mounted_kubernetes_secret_are_read_through_links(tmp_path):
    """kvbus reads a key from a Kubernetes Secret with fsGroup and defaultMode 0440.

    The group may read such a file, and its path leads through two symbolic links.
    """
    data = tmp_path / "..2026_11_21"
    data.mkdir()
    pair = Pair(data, "kvbus")
    pair.secret_file.chmod(0o440)
    (tmp_path / "..data").symlink_to(data.name)
    for file in (pair.secret_file, pair.public_file):
        (tmp_path / file.name).symlink_to(f"..data/{file.name}")
    assert read_secret(tmp_path / "kvbus.key_secret") == (pair.public, pair.secret)
    routers = tmp_path / "routers"
    routers.mkdir()
    real = routers / "..data"
    real.mkdir()
    (real / "a.key").write_text(certificate(pair.public))
    (routers / "a.key").symlink_to("..data/a.key")
    assert len(read_allowed(routers)) == 1


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601, 0o666, 0o444])
def test_a_secret_key_that_other_users_can_access_is_refused(tmp_path, mode):
    pair = Pair(tmp_path, "kvbus")
    pair.secret_file.chmod(mode)
    with pytest.raises(KeyFileError, match=rf"other users can read it \(mode {mode:04o}\)") as caught:
        read_secret(pair.secret_file)
    assert pair.secret.decode() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640, 0o660])
def test_a_secret_key_may_be_readable_for_owner_and_group(tmp_path, mode):
    pair = Pair(tmp_path, "kvbus")
    pair.secret_file.chmod(mode)
    assert read_secret(pair.secret_file)[0] == pair.public


# The key pair of libzmq's examples. Random keys would give the tests other ids in each process.
PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
SECRET = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
OTHER = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize(
    ("read", "text", "wrong"),
    [
        (read_secret, "", "holds no secret key"),
        (read_secret, 'public-key = "' + "x" * 39 + '"', "its public-key is not 40 characters"),
        (read_secret, certificate(PUBLIC.encode()), "holds no secret key"),
        (read_secret, certificate(OTHER.encode(), SECRET.encode()), "does not belong to its secret key"),
        (read_secret, "hunter2", "a key is 40 characters"),
        (read_secret, f"{SECRET}\n{SECRET}\n", "more than one key"),
        (read_secret, "~" * 40, "a key is 40 characters"),
        (read_secret, "#" * 40, "holds no secret key"),
        (read_public, f'secret-key = "{SECRET}"', "holds a secret key"),
        (read_public, "metadata\n  name = x\ncurve\n", "holds no public key"),
        (read_allowed, f'secret-key = "{SECRET}"', "holds a secret key"),
        (read_allowed, "router-a: abc", "a key is 40 characters"),
        (read_allowed, "x" * (MAX_FILE_BYTES + 1), "too large"),
    ],
)
def test_a_file_without_a_valid_key_is_refused_and_not_quoted(tmp_path, read, text, wrong):
    with pytest.raises(KeyFileError, match=wrong) as caught:
        read(private(tmp_path / "file", text))
    assert SECRET not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_missing_files_and_directories_and_pipes_are_refused_as_keys(tmp_path):
    with pytest.raises(KeyFileError, match="No such file"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(KeyFileError, match="is not a regular file"):
        read_secret(tmp_path)
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_allowed(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    # Opening a named pipe must not wait for its writer.
    with pytest.raises(KeyFileError, match="is not a regular file"):
        read_public(tmp_path / "pipe")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "bad.key").write_text("bad")
    with pytest.raises(KeyFileError, match=r"bad\.key: a key is"):
        read_allowed(tmp_path / "keys")


def test_all_bad_key_files_of_a_configuration_are_reported_together(tmp_path):
    keys = Keyring(tmp_path)
    keys.bus.secret_file.chmod(0o644)
    keys.allowed.write_text("nonsense")
    source = {"endpoint": "ipc:///e", "curve_secret_key_file": "/nowhere", "curve_server_key_file": "/nobody"}
    config = load(None, env={}, overrides={"sources": [source], "outputs": [{"endpoint": "ipc:///o", **keys.output}]})
    with pytest.raises(ConfigError) as caught:
        read_keys(config)
    assert [problem.key for problem in caught.value.problems] == [
        "sources[0].curve_secret_key_file",
        "sources[0].curve_server_key_file",
        "outputs[0].curve_secret_key_file",
        "outputs[0].curve_client_keys",
    ]


def test_repr_and_str_of_curve_keys_do_not_show_the_secret_key(tmp_path):
    keys = Keyring(tmp_path)
    curve = client_keys(keys.router.secret_file, keys.bus.public_file)
    assert keys.router.secret.decode() not in repr(curve)
    assert keys.router.secret.decode() not in str(curve)


@pytest.mark.parametrize(
    ("output", "clear"),
    [
        ({"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://127.0.0.1:5658"}, "(tcp://*:5657)"),
        ({"endpoint": "tcp://127.0.0.1:5657", "replay_endpoint": "tcp://0.0.0.0:5658"}, "(tcp://0.0.0.0:5658)"),
        ({"endpoint": "tcp://10.0.0.7:5657", "bind": False}, "(tcp://10.0.0.7:5657)"),
        ({"endpoint": "tcp://router.example:5657", "bind": False}, "(tcp://router.example:5657)"),
        ({"endpoint": "ipc:///run/kv", "snapshot_endpoint": "tcp://[::]:5659"}, "(tcp://[::]:5659)"),
        ({"endpoint": "tcp://127.0.0.1:5657", "replay_endpoint": "tcp://localhost:5658"}, None),
        ({"endpoint": "tcp://[::1]:5657"}, None),
        ({"endpoint": "ipc:///run/kv"}, None),
        ({"endpoint": "tcp://*:5657", "curve_secret_key_file": "/s", "curve_client_keys": "/c"}, None),
    ],
)
def test_an_output_that_sends_tokens_unencrypted_is_reported(output, clear):
    config = load(None, env={}, overrides={"sources": [{"endpoint": "ipc:///e"}], "outputs": [output]})
    assert in_clear(config) == (
        []
        if clear is None
        else [f"output routers: token ids leave this machine unencrypted {clear}: see curve_secret_key_file"]
    )


class TestKeygen:
    def run(self, *args):
        return CliRunner().invoke(main, ["keygen", *map(str, args)])

    def test_keygen_writes_a_key_pair_and_prints_the_public_key(self, tmp_path):
        done = self.run("kvbus", "-d", tmp_path / "new")
        assert done.exit_code == 0
        public, secret = read_secret(tmp_path / "new" / "kvbus.key_secret")
        assert done.stdout == f"{public.decode()}\n"
        assert read_public(tmp_path / "new" / "kvbus.key") == public
        assert stat.S_IMODE((tmp_path / "new" / "kvbus.key_secret").stat().st_mode) == 0o600
        assert secret.decode() not in done.output
        told = self.run("--public-of", tmp_path / "new" / "kvbus.key_secret")
        assert told.stdout == f"{public.decode()}\n"

    def test_keygen_does_not_overwrite_a_key_without_force(self, tmp_path):
        assert self.run("kvbus", "-d", tmp_path).exit_code == 0
        before = (tmp_path / "kvbus.key_secret").read_text()
        done = self.run("kvbus", "-d", tmp_path)
        assert done.exit_code == 78
        assert "exists already; --force replaces it" in done.output
        assert (tmp_path / "kvbus.key_secret").read_text() == before
        (tmp_path / "kvbus.key_secret").chmod(0o644)
        assert self.run("kvbus", "-d", tmp_path, "--force").exit_code == 0
        assert (tmp_path / "kvbus.key_secret").read_text() != before
        assert stat.S_IMODE((tmp_path / "kvbus.key_secret").stat().st_mode) == 0o600

    @pytest.mark.parametrize(("args", "code"), [([], 2), (["a/b"], 2), (["kvbus", "-d", "/proc/nowhere"], 78)])
    def test_keygen_refuses_invalid_arguments(self, args, code):
        assert self.run(*args).exit_code == code

    def test_keygen_public_of_a_missing_file_fails(self, tmp_path):
        done = self.run("--public-of", tmp_path / "nothing")
        assert isinstance(done.exception, SystemExit | ConfigError)
        assert done.exit_code in (1, 78)


def test_an_output_without_tokens_is_reported_to_send_hashes_unencrypted():
    outputs = [{"endpoint": "tcp://*:5657", "token_ids": "drop"}]
    (said,) = in_clear(load(None, env={}, overrides={"sources": [{}], "outputs": outputs}))
    assert "block hashes leave this machine unencrypted" in said


def test_a_kafka_output_without_tls_is_reported_as_unencrypted():
    def unencrypted(**keys):
        output = {"type": "kafka", "endpoint": "tcp://kafka-0:9092", **keys}
        return in_clear(load(None, env={}, overrides={"model": "m", "sources": [{}], "outputs": [output]}))

    assert unencrypted(kafka={"tls_ca_file": "/a"}) == []
    (clear,) = unencrypted()
    assert clear.endswith("(tcp://kafka-0:9092): see kafka.tls_ca_file")
