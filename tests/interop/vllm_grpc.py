"""What vLLM's gRPC API answers to a router and to a worker beside it; the engine generates one token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.front.grpc_pod import CONTROL, SOURCES, GrpcApi, message, serve

from .cache import BLOCK_SIZE
from .vllm_router import VllmRouter

if TYPE_CHECKING:
    from pathlib import Path

MODEL = {
    "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2, "eos_token_id": 1},
    "tokenizer.json": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}},
}
HEALTH = "/grpc.health.v1.Health/Check"
GENERATE = "/vllm.Inference/GenerateStream"


class VllmApi(GrpcApi):
    """vLLM's, as `rust/proto` has it.

    Args:
        model: a directory; it is written.
        ranks: of the engine.
    """

    def __init__(self, model: Path, ranks: int = 1) -> None:
        super().__init__()
        model.mkdir()
        for name, content in MODEL.items():
            (model / name).write_text(json.dumps(content))
        at = str(model).encode()
        parallel = message(f1=1, f2=1, f3=ranks, f6=1)
        finish = message(f1=1, f2=1)
        self.answers = {
            HEALTH: message(f1=1),
            CONTROL + "GetServerInfo": message(
                f1=b"0.33.0", f2=b"vllm", f3=b"i", f4=parallel, f5=4096, f6=BLOCK_SIZE, f7=10_000, f8=8, f9=2048
            ),
            CONTROL + "GetModelInfo": message(f1=at, f2=at, f20=1, f21=1),
            GENERATE: message(f1=message(f1=17), f2=message(f2=b" a", f3=1, f4=b"\1", f8=finish)),
        }

    def publishes(self, *endpoints: tuple[str, str | None]) -> None:
        """Say where each rank's events and their replay are."""
        self.answers[SOURCES] = b"".join(
            message(
                f1=message(
                    f1=b"zmq", f2=live.encode(), f4=(replay or "").encode(), f5=rank, f6=b"msgpack", f7=1, f8=10_000
                )
            )
            for rank, (live, replay) in enumerate(endpoints)
        )


class VllmRouterByGrpc(VllmRouter):
    """The same router, whose worker has a gRPC API alone."""

    def __init__(self, program: Path, directory: Path, name: str, **more: Any) -> None:
        super().__init__(program, directory, name, **more)
        self.model = str(directory / f"{name}-model")
        self.api = VllmApi(directory / f"{name}-model")

    def _url(self, port: int) -> str:
        return f"grpc://127.0.0.1:{port}"

    async def _serve(self) -> None:
        if self._sources:
            self.api.publishes(*((each["endpoint"], each["replay_endpoint"]) for each in self._sources.values()))
        self._server = await serve(self.api, self._worker)

    async def _end(self) -> None:
        await self._server.stop(None)
