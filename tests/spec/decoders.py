"""The published decoders of vLLM and SGLang at the vectors; no module of kvbus is needed.

``python -m tests.spec.decoders ENGINE DIRECTORY``, with the directory of an engine that ``.ci/engines.sh`` has made, prints
as JSON what its decoder says of each vector: nothing where it decodes all payloads, otherwise why it refuses the first
that it cannot decode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.conform.published import load


def payloads(vector: dict[str, Any]) -> list[bytes]:
    """The payloads of its messages of three frames, and of its answer without the END."""
    live = [frames[2] for frames in vector["live"] if len(frames) == 3]
    return [bytes.fromhex(each) for each in live + [frames[-1] for frames in vector.get("replay", [])] if each]


def refusal(decode: Any, vector: dict[str, Any]) -> str:
    try:
        for payload in payloads(vector):
            decode(payload)
    except msgspec.DecodeError as error:
        return str(error)
    return ""


def main() -> None:
    engine, directory = sys.argv[1:]
    module = load(engine)
    decode = msgspec.msgpack.Decoder(module.KVEventBatch).decode
    said = {path.stem: refusal(decode, json.loads(path.read_text())) for path in Path(directory).glob("*.json")}
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
