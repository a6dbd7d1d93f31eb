"""Dynamo's worker beside a vLLM engine, as its wheel has it. It runs in Dynamo's own environment; SIGTERM ends it."""

from __future__ import annotations

import sys

from dynamo._core import backend

backend._run_vllm_sidecar(sys.argv[1:])  # noqa: SLF001 - what `python -m dynamo.vllm.sidecar` does
