"""``state_key_file``: what it may hold, and what a start does with a state that was sealed with it, or was not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbus.common.errors import ConfigError, StateKeyError
from kvbus.config import Config, load
from kvbus.core.events import BatchReceived
from kvbus.daemon import state_store
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.generations import SPARE
from kvbus.daemon.state_file import described
from kvbus.daemon.state_keys import StateKeys, read_state_keys
from kvbus.transport.curve import KeyFileError
from tests.daemon.test_state_damage import blocks_of, next_seq_of, rotated
from tests.doubles.payloads import batch, pack, removed, store
from tests.ports import free_ports

ONE, TWO, THREE = "11" * 32, "22" * 32, "33" * 32
TOKEN = 0xF0F0F0F0
HASH = b"a-hash-that-can-be-recognised-32"
NAMES = (b"XYZZY", pack(TOKEN), TOKEN.to_bytes(4, "little"), HASH)


def key_file(directory: Path, *lines: str, mode: int = 0o600) -> Path:
    path = directory / "state.key"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return path


class TestAFile:
    def test_the_first_key_seals_and_all_open(self, tmp_path: Path) -> None:
        keys = read_state_keys(key_file(tmp_path, "# since March", ONE, "", f"  {TWO.upper()} ", "clear"))
        assert keys == StateKeys(bytes.fromhex(ONE), (bytes.fromhex(ONE), bytes.fromhex(TWO)), clear=True)
        assert not read_state_keys(key_file(tmp_path, ONE)).clear
        assert read_state_keys(key_file(tmp_path, "clear", ONE)).first is None
        assert read_state_keys(None) == StateKeys()

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([], "holds no key"),
            (["clear"], "holds no key"),
            (["# a comment"], "holds no key"),
            ([ONE, "not a key"], "line 2 is no key: 64 hexadecimal digits"),
            ([ONE[:-1]], "line 1 is no key"),
            ([f"{ONE}{ONE}"], "line 1 is no key"),
            ([ONE, ONE], "holds a line twice"),
            ([ONE, "clear", "clear"], "holds a line twice"),
            (["Clear", ONE], "line 1 is no key"),
        ],
    )
    def test_of_anything_else_is_refused_and_not_quoted(self, tmp_path: Path, lines: list[str], said: str) -> None:
        with pytest.raises(KeyFileError, match=said) as caught:
            read_state_keys(key_file(tmp_path, *lines))
        assert ONE[:8] not in str(caught.value)
        assert "not a key" not in str(caught.value)

    def test_that_others_may_read_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileError, match="others may read it"):
            read_state_keys(key_file(tmp_path, ONE, mode=0o604))
        assert read_state_keys(key_file(tmp_path, ONE, mode=0o440)).first

    def test_is_shown_nowhere(self, tmp_path: Path) -> None:
        keys = read_state_keys(key_file(tmp_path, ONE))
        assert "11" not in repr(keys)
        assert "\\x11" not in repr(keys)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    engine, live = free_ports(2)
    return load(
        None,
        env={},
        overrides={
            "sources": [{"name": "XYZZY-engine", "endpoint": f"tcp://127.0.0.1:{engine}"}],
            "outputs": [{"name": "XYZZY-routers", "endpoint": f"tcp://127.0.0.1:{live}", "heartbeat": 0}],
            "http": None,
            "on_lost": "keep",
            "state_dir": str(tmp_path / "state"),
        },
    )


def with_keys(config: Config, tmp_path: Path, *lines: str) -> Config:
    path = key_file(tmp_path, *lines) if lines else None
    return config.model_copy(update={"state_key_file": path})


async def ran(config: Config, blocks: Sequence[int], *, kill: bool = False) -> tuple[set[int | bytes], int]:
    """Run on these blocks, each with what can be recognised; what was there at the end."""
    daemon = Daemon(config)
    await daemon.start()
    first = daemon.relay.sources[0].sequencer.next
    for at, block in enumerate(blocks, first):
        event = store(
            [HASH[:-2] + block.to_bytes(2, "big")],
            tokens=[TOKEN] * 16,
            lora_name="XYZZY-adapter",
            session_id="XYZZY-session",
            extra_keys=[["XYZZY-salt"]],
        )
        daemon.feed(BatchReceived(0, batch(at, event, removed([HASH]), topic=b"XYZZY-topic")))
    assert daemon.state is not None
    assert not daemon.state.refused
    if not kill:
        rotated(daemon)
    found = blocks_of(daemon), next_seq_of(daemon)
    await daemon.close(drain=0)
    return found


def files(config: Config) -> list[Path]:
    return list(Path(str(config.state_dir)).iterdir())


def kinds(config: Config) -> dict[str, bool]:
    """The files with content, and whether they are sealed."""
    return {
        path.name: described(path.read_bytes())[1]
        for path in files(config)
        if path.name.startswith("state-") or path.name == SPARE
    }


def plain(config: Config) -> set[str]:
    """Names of files that tell anything of what went through."""
    return {path.name for path in files(config) for name in NAMES if name in path.read_bytes()}


async def test_nothing_of_a_sealed_state_can_be_read(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ran(config, range(40))
    assert plain(config), "what is looked for is found"
    shutil.rmtree(str(config.state_dir))
    monkeypatch.setattr(state_store, "MIN_ROTATE", 2_000)
    sealed = with_keys(config, tmp_path, ONE)
    left = await ran(sealed, range(40))
    assert await ran(sealed, []) == left
    left = await ran(sealed, range(40, 80), kill=True)
    assert await ran(sealed, []) == left
    assert {SPARE} < kinds(sealed).keys()
    assert all(kinds(sealed).values())
    assert plain(sealed) == set()
    assert {path.stat().st_mode & 0o777 for path in files(sealed)} == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([ONE], [], "is sealed: set state_key_file, or remove the state with `kvbus state wipe`"),
        ([ONE], [TWO], "is sealed with a key that is not in state_key_file: add that key as one more line"),
        ([ONE], ["clear", TWO], "is sealed with a key that is not in state_key_file"),
        ([], [ONE], "is not sealed, and state_key_file has no line `clear`"),
    ],
)
@pytest.mark.parametrize("damaged", ["", "commit", "log", "dump"])
async def test_without_its_key_a_state_stays_as_it_is(
    config: Config, tmp_path: Path, before: list[str], after: list[str], said: str, damaged: str
) -> None:
    """Also where it would be refused for what else is wrong with it: then a key is missing to look at what is left."""
    left = await ran(with_keys(config, tmp_path, *before), range(5))
    directory = Path(str(config.state_dir))
    if damaged:
        (path,) = [path for path in files(config) if path.name == damaged or path.suffix == f".{damaged}"]
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if damaged != "commit" else b"")
    content = {path.name: path.read_bytes() for path in files(config) if path.suffix != ".seq"}
    for _ in range(2):  # it holds no lock
        with pytest.raises(StateKeyError, match=said) as caught:
            Daemon(with_keys(config, tmp_path, *after))
        assert caught.value.exit_code == 78
    assert {name: (directory / name).read_bytes() for name in content} == content | {
        "lock": (directory / "lock").read_bytes()
    }
    if not damaged:
        assert await ran(with_keys(config, tmp_path, *before), []) == left


@pytest.mark.parametrize(
    "steps",
    [
        [[ONE], [TWO, ONE], [TWO], [THREE, TWO]],
        [[], [ONE, "clear"], [ONE]],
        [[ONE], ["clear", ONE], []],
        [[], [TWO, "clear"], ["clear", TWO], []],
    ],
)
async def test_keys_change_from_one_start_to_the_next(
    config: Config, tmp_path: Path, steps: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    left = await ran(with_keys(config, tmp_path, *steps[0]), range(20))
    for number, lines in enumerate(steps[1:], 1):
        now = with_keys(config, tmp_path, *lines)
        caplog.clear()
        with caplog.at_level("INFO", "kvbus.state"):
            again = await ran(now, range(20 * number, 20 * number + 20))
        said = [text for text in caplog.messages if "no other line of state_key_file is needed any more" in text]
        assert len(said) == bool(lines), "once"
        assert left[0] < again[0], "nothing is missing"
        assert again[1] == left[1] + 20, "the numbering goes on"
        if ([*lines, "clear"])[0] != ([*steps[number - 1], "clear"])[0]:
            assert SPARE not in kinds(now), "under the other key, or under none"
        left = again
        assert {sealed for name, sealed in kinds(now).items() if name != SPARE} == {bool(lines) and lines[0] != "clear"}
        if lines and lines[0] != "clear":
            assert plain(now) == set()


@pytest.mark.parametrize("lines", [[TWO, ONE], ["clear", ONE]])
async def test_killed_before_the_new_checkpoint_is_complete_both_keys_are_needed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    left = await ran(with_keys(config, tmp_path, ONE), range(20))
    with monkeypatch.context() as patch:
        patch.setattr(state_store.StateStore, "_go_on", lambda *_, **__: None)
        left = await ran(with_keys(config, tmp_path, *lines), range(20, 30), kill=True)
    with pytest.raises(StateKeyError):
        Daemon(with_keys(config, tmp_path, *([] if lines[0] == "clear" else lines[:1])))
    assert await ran(with_keys(config, tmp_path, *lines), []) == left


async def test_what_was_moved_aside_in_clear_goes_when_the_state_is_sealed(config: Config, tmp_path: Path) -> None:
    await ran(config, range(5))
    directory = Path(str(config.state_dir))
    shutil.copy(directory / "state-1.log", directory / "state-1.log.refused-20260101T000000")
    sealed = with_keys(config, tmp_path, ONE, "clear")
    await ran(sealed, range(5, 10))
    assert plain(sealed) == set()
    assert not [path for path in files(config) if ".refused-" in path.name]


async def test_a_bad_key_file_is_a_mistake_of_the_configuration(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_key_file = .*: line 1 is no key"):
        Daemon(with_keys(config, tmp_path, "secret"))
