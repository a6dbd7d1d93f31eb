"""Run `dynamo.mocker` and `dynamo.frontend` so that the frontend learns only of the event sources that kvbus announces.

The mocker always publishes on Dynamo's event plane; no option turns that off. Two event sources of one worker are
ambiguous, so the mockers and the frontend have separate discovery directories. :class:`Mirror` copies the mockers'
instances and model cards to the frontend's directory, but not their event sources.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.doubles.bus import wait_for
from tests.ports import free_port

from .dynamo import PYTHON_ENV
from .support import stop_process

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK: Final = 16
WORDS: Final = 2000
MODEL: Final = "m"

_TOKENIZER: Final[dict[str, Any]] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number + 3 for number in range(WORDS)},
    },
}
_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": WORDS + 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 100_000,
}

_CHAT: Final = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_model(directory: Path) -> Path:
    """Write a model directory that has only a tokenizer; return the directory. Each word is a token."""
    directory.mkdir()
    for name, content in (
        ("tokenizer.json", _TOKENIZER),
        ("config.json", _CONFIG),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT}),
    ):
        (directory / name).write_text(json.dumps(content))
    return directory


class Program:
    """A Python module of Dynamo in a process. The process ends when the ``with`` block ends.

    Args:
        module: name of the module.
        directory: directory of the process's log and cache.
        discovery: directory of Dynamo's discovery.
        host: address of this machine at which the process serves.
        options: command-line options of the module.
    """

    def __init__(self, module: str, directory: Path, discovery: Path, host: str, options: Sequence[object]) -> None:
        self.log = directory / f"{module}-{host}.log"
        self._command = [
            os.environ[PYTHON_ENV],
            "-m",
            module,
            "--discovery-backend=file",
            "--event-plane=zmq",
            *options,
        ]
        hosts = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        self._env |= {"DYN_FILE_KV": str(discovery), "HOME": str(directory), "HF_HUB_OFFLINE": "1"}
        self._env |= dict.fromkeys(hosts, host)

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, self._command)), env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self._process)

    def kill_and_start_again(self) -> None:
        """Kill the process with SIGKILL, and start it with the same command line."""
        self._process.kill()
        self._process.wait(60)
        self.__enter__()


class Mocker(Program):
    """`dynamo.mocker`: a simulated vLLM with its own cache, which publishes its events at ports like vLLM's."""

    def __init__(self, directory: Path, discovery: Path, host: str, model: Path) -> None:
        events, replay = free_port(), free_port()
        self.endpoint = f"tcp://127.0.0.1:{events}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.host = host
        self._discovery = discovery
        options = {
            "model-path": model,
            "model-name": MODEL,
            "engine-type": "vllm",
            "block-size": BLOCK,
            "num-gpu-blocks-override": 300,
            "speedup-ratio": 0,
            "kv-bytes-per-token": 1024,
            "zmq-kv-events-ports": events,
            "zmq-replay-ports": replay,
        }
        super().__init__(
            "dynamo.mocker", directory, discovery, host, [f"--{key}={value}" for key, value in options.items()]
        )

    @property
    def workers(self) -> list[int]:
        """The ids of the workers for which the mocker has a model card.

        A killed mocker keeps its card for ten seconds.
        """
        return [each for each, host in self._cards() if host == self.host]

    def _cards(self) -> list[tuple[int, str]]:
        found = []
        for path in (self._discovery / "v1" / "instances").glob("*%2Fgenerate%2F*"):
            if (self._discovery / "v1" / "mdc" / path.name).exists():
                with contextlib.suppress(OSError, ValueError):  # the file is being written or was just removed
                    about = json.loads(path.read_text())
                    found.append((about["instance_id"], about["transport"]["tcp"].partition(":")[0]))
        return found


class Mirror:
    """A copy of the instances and model cards of one discovery directory in another, kept up to date by hard links."""

    BUCKETS: Final = ("instances", "mdc")

    def __init__(self, theirs: Path, ours: Path) -> None:
        self._pairs = [(theirs / "v1" / bucket, ours / "v1" / bucket) for bucket in self.BUCKETS]
        for pair in self._pairs:
            for each in pair:
                each.mkdir(parents=True)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            for theirs, ours in self._pairs:
                there, here = ({path.name for path in each.iterdir()} for each in (theirs, ours))
                for name in there - here:
                    with contextlib.suppress(FileNotFoundError):  # the file was removed in the meantime
                        (ours / name).hardlink_to(theirs / name)
                for name in here - there:
                    (ours / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Answer:
    """What the frontend's answer says about one request.

    Attributes:
        worker: id of the worker that served the request.
        held: blocks of the prompt that the engine had in its cache.
        known: blocks of the prompt that the router believed it had.
    """

    worker: int
    held: int
    known: int


class Frontend(Program):
    """`dynamo.frontend` with its KvRouter. The tests send requests over HTTP, as clients do."""

    def __init__(self, directory: Path, discovery: Path) -> None:
        self._port = free_port()
        options = ["--router-mode=kv", "--http-host=127.0.0.1", f"--http-port={self._port}"]
        super().__init__("dynamo.frontend", directory, discovery, "127.0.0.1", options)

    def ask(self, words: Sequence[str], worker: int | None = None) -> Answer:
        """Send a prompt to the frontend, and return what it answers.

        If ``worker`` is None, the router chooses the worker.
        """
        status, answer = self._call(" ".join(words), {} if worker is None else {"backend_instance_id": worker})
        assert status == 200, answer
        about = json.loads(answer)
        usage, said = about["usage"], about["nvext"]
        blocks = -(-usage["prompt_tokens"] // BLOCK)
        held, rest = divmod(usage["prompt_tokens_details"]["cached_tokens"], BLOCK)
        assert not rest
        return Answer(said["worker_id"]["decode_worker_id"], held, round(said["timing"]["kv_hit_rate"] * blocks))

    def serves(self, workers: Sequence[int]) -> bool:
        """Return whether the frontend sends requests to each of these workers."""
        with contextlib.suppress(OSError):
            return all(self._call("w0", {"backend_instance_id": worker})[0] == 200 for worker in workers)
        return False

    def _call(self, prompt: str, where: dict[str, int]) -> tuple[int, str]:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1,
            "nvext": {"extra_fields": ["worker_id", "timing"], **where},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def one_worker(mocker: Mocker, *before: int) -> int:
    """Wait until the mocker has exactly one worker id that is not among the ids in ``before``, and return it."""
    wait_for(lambda: len(mocker.workers) == 1 and mocker.workers[0] not in before, f"one worker; log: {mocker.log}", 60)
    return mocker.workers[0]
