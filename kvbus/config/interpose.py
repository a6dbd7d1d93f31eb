"""The key ``interpose``: short for a source and an output at one endpoint."""

from __future__ import annotations

from kvbus.config.outputs import OutputConfig
from kvbus.config.section import Section, key
from kvbus.config.sources import SourceConfig
from kvbus.config.values import Endpoint, Int, Name, ProfileName


class Interpose(Section):
    """An engine that dials, and routers that dial the address in the engine's own flags."""

    name: Name = key("engine", "Metrics label of the engine's source.", example="engine")
    endpoint: Endpoint = key(
        "tcp://127.0.0.1:5557",
        "What the engine's flag says, which the engine dials and routers derive their address from; kvbus listens "
        "there, and by the socket type that a peer names it knows an engine from a router. Rank r is at port + r.",
        example="tcp://127.0.0.1:5557",
    )
    data_parallel_size: Int = key(1, "Ranks of the engine.", example=1, unit="ranks", ge=1, le=4096)
    engine_replay_endpoint: Endpoint | None = key(
        None,
        "The engine's replay (`replay_endpoint` in vLLM's and SGLang's `--kv-events-config`), which it always binds: "
        "another port than `replay_endpoint` here. null: it has none, and every gap is lost.",
        example="tcp://127.0.0.1:5658",
    )
    profile: ProfileName = key("vllm", "Whose framing and encoding these routers read.", example="dynamo")
    replay_endpoint: Endpoint | None = key(
        None,
        "Where routers ask kvbus for a replay: the address that they derive, or are given. null: none.",
        example="tcp://127.0.0.1:5558",
    )

    def parts(self) -> tuple[SourceConfig, OutputConfig]:
        """Return the source and the output that this is short for."""
        source = SourceConfig(
            name=self.name,
            endpoint=self.endpoint,
            replay_endpoint=self.engine_replay_endpoint,
            bind=True,
            data_parallel_size=self.data_parallel_size,
        )
        output = OutputConfig(
            name="interposed",
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            interpose=True,
            profile=self.profile,
        )
        return source, output


def as_written(text: str, source: int, output: int) -> str:
    """Name the keys of ``interpose`` in place of those of its source and its output, which nobody has written.

    Args:
        text: what is said of the configuration.
        source: the source's position.
        output: the output's position.
    """
    text = text.replace(f"sources[{source}].replay_endpoint", "interpose.engine_replay_endpoint")
    return text.replace(f"sources[{source}]", "interpose").replace(f"outputs[{output}]", "interpose")
