"""An event bus between LLM engines' KV-cache events and KV-aware routers."""

from pathlib import Path

from kvbus.common import distributions

distributions.check(Path(__file__).parent)
