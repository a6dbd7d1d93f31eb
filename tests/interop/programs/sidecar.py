"""Dynamo's worker beside an engine, as its wheel has it. It runs in Dynamo's own environment; SIGTERM ends it."""

from __future__ import annotations

import sys

from dynamo._core import backend

# what `python -m dynamo.vllm.sidecar` does, and the others of its kind: the first argument names the engine
getattr(backend, f"_run_{sys.argv[1]}_sidecar")(sys.argv[2:])
