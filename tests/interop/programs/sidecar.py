"""Run Dynamo's sidecar from Dynamo's wheel: the Dynamo worker that runs beside an engine and reads its events.

It runs in Dynamo's environment; SIGTERM ends it.
"""

from __future__ import annotations

import sys

from dynamo._core import backend

# This code is also run by `python -m dynamo.vllm.sidecar` and the sidecars of the other engines.
# The first argument names the engine.
getattr(backend, f"_run_{sys.argv[1]}_sidecar")(sys.argv[2:])
