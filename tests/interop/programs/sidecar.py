"""Dynamo's sidecar: the worker beside an engine, from Dynamo's wheel.

It runs in Dynamo's environment; SIGTERM ends it.
"""

from __future__ import annotations

import sys

from dynamo._core import backend

# This code is also run by `python -m dynamo.vllm.sidecar` and the sidecars of the other engines.
# The first argument names the engine.
getattr(backend, f"_run_{sys.argv[1]}_sidecar")(sys.argv[2:])
