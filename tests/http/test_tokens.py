"""Tests for the bearer tokens of the HTTP server: the file of tokens, each error in it, and ``kvbus token``."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbus.cli import main
from kvbus.http.credentials import MAX_TOKENS, find, line_of, new_token, read_tokens
from kvbus.transport.curve import KeyFileError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def test_a_token_is_found_only_by_its_hash(file: Path) -> None:
    tokens = [new_token() for _ in range(3)]
    lines = ["# readers", "", *(line_of(f"reader-{n}", token, content=n != 1) for n, token in enumerate(tokens))]
    file.write_text("\n".join(lines) + "\n")
    read = read_tokens(file)
    for n, token in enumerate(tokens):
        found = find(read, token)
        assert found is not None
        assert (found.name, found.content) == (f"reader-{n}", n != 1)
        assert token not in file.read_text()
    digest = read[0].digest.hex()
    for wrong in ("", tokens[0][:-1], tokens[0] + " ", tokens[0].upper(), digest, "\udcff"):
        assert find(read, wrong) is None
    assert digest not in repr(read)


def test_a_name_may_have_two_tokens_while_one_is_replaced(file: Path) -> None:
    file.write_text("\n".join(line_of("a", new_token(), content=True) for _ in range(2)))
    assert [token.name for token in read_tokens(file)] == ["a", "a"]


def test_a_token_has_256_random_bits_and_a_prefix() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch("kvbus_[A-Za-z0-9_-]{43}", token) for token in tokens)


HASH = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "is empty"),
        ("a", "line 1 is not NAME"),
        (f"# x\n{HASH}", "line 2 is not NAME"),
        (f"a {HASH} all", "line 1 is not NAME"),
        (f"a {HASH} status status", "line 1 is not NAME"),
        (f"a {HASH[:-1]}", "line 1 is not NAME"),
        (f"a {HASH}0", "line 1 is not NAME"),
        (f"a {HASH.upper()}", "line 1 is not NAME"),
        (f"a {HASH[7:]}", "line 1 is not NAME"),
        (f"-a {HASH}", "line 1 is not NAME"),
        (f"a/b {HASH}", "line 1 is not NAME"),
        (f"{'a' * 64} {HASH}", "line 1 is not NAME"),
        ("a " + new_token(), "line 1 is not NAME"),
        (f"a {HASH}\nb {HASH}", "line 2 has the hash of a line above it"),
        ("\n".join(f"a sha256:{n:064x}" for n in range(MAX_TOKENS + 1)), "holds more than 256 tokens"),
    ],
    ids=range(15),
)
def test_a_bad_token_file_is_refused_and_not_quoted(file: Path, text: str, wrong: str) -> None:
    file.write_text(text)
    with pytest.raises(KeyFileError, match=wrong) as caught:
        read_tokens(file)
    assert "kvbus_" not in str(caught.value)
    assert "abab" not in str(caught.value)


def test_a_token_file_with_write_permission_for_other_users_is_refused(file: Path) -> None:
    file.write_text("# nobody\n")
    assert read_tokens(file) == ()
    file.chmod(0o646)
    with pytest.raises(KeyFileError, match=r"other users may write to it \(mode 0646\)"):
        read_tokens(file)
    file.unlink()
    with pytest.raises(KeyFileError, match="No such file"):
        read_tokens(file)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["token", *map(str, args)])


def test_kvbus_token_prints_the_line_of_the_file_and_shows_the_token_once(file: Path) -> None:
    done = run("router-a")
    (token,) = re.findall(r"kvbus_[\w-]+", done.stderr)
    file.write_text(done.stdout)
    found = find(read_tokens(file), token)
    assert found is not None
    assert (found.name, found.content) == ("router-a", True)
    assert token not in done.stdout


def test_kvbus_token_writes_a_token_that_only_its_owner_can_read(file: Path) -> None:
    to = file.with_name("router-a.token")
    done = run("router-a", "--status", "-o", to)
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
    file.write_text(done.stdout)
    found = find(read_tokens(file), to.read_text().strip())
    assert found is not None
    assert not found.content
    assert to.read_text().strip() not in done.output
    again = run("router-a", "-o", to)
    assert (again.exit_code, "File exists" in again.stderr) == (78, True)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "#a"])
def test_kvbus_token_refuses_an_invalid_name(name: str) -> None:
    done = run(name)
    assert (done.exit_code, "is not a name" in done.stderr) == (2, True)
