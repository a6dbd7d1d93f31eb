"""Give the test vectors to the published decoders of vLLM and SGLang. This program needs no kvbus.

``python -m tests.spec.decoders ENGINE DIRECTORY`` uses the engine in the directory ENGINE, which ``.ci/engines.sh`` has
made. It prints a JSON object with the result for each vector: an empty string if the decoder reads all payloads,
otherwise its error for the first payload that it cannot decode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.conform.published import load


def payloads(vector: dict[str, Any]) -> list[bytes]:
    """Return the payloads of a test vector, first of its live messages, then of its replay.

    Live messages without three frames, and the END of the replay, have no payload.
    """
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
