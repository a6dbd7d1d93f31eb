# ruff: noqa: SLF001 - the engine has no public way to its pool
"""A plugin of vLLM: GET http://127.0.0.1:PORT/dump returns the blocks in the engine's own block pool.

PORT is ``BLOCK_POOL_DUMP_PORT`` plus the data-parallel rank. This module runs inside the engine's process, without
kvbus.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
from typing import Any

from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

PORT = "BLOCK_POOL_DUMP_PORT"


def dump(manager: Any, publisher: Any) -> dict[str, Any]:
    """Return the blocks of the engine's pool, the kinds of its groups, and the number of unsent events.

    A block is a list: group, hash, and number of physical copies.
    """
    pool = manager.block_pool
    blocks = []
    # The engine's thread may change the dictionary at the same time. Copying its items does not release the GIL.
    for key, held in list(pool.cached_block_hash_to_block._cache.items()):
        block_hash = maybe_convert_block_hash(get_block_hash(key))
        name = block_hash.hex() if isinstance(block_hash, bytes) else str(block_hash)
        blocks.append([get_group_id(key), name, len(held) if isinstance(held, dict) else 1])
    waiting = len(pool.kv_event_queue) + publisher._event_queue.qsize()
    return {"blocks": blocks, "kinds": [kind for kind, _ in manager.kv_cache_event_metadata], "waiting": waiting}


def serve(manager: Any, publisher: Any) -> None:
    """Start an HTTP server in a thread, which answers GET /dump with the blocks that the engine's block pool holds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(dump(manager, publisher)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing, so that these requests are not in the engine's log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ[PORT]) + publisher._dp_rank), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def register() -> None:
    """Start the server as soon as this process has a scheduler's cache and a publisher.

    vLLM calls this function in each of its processes.
    """
    if PORT not in os.environ:
        return
    made: dict[type, Any] = {}

    def watch(kind: Any) -> None:
        constructor = kind.__init__

        def construct(self: Any, *arguments: Any, **named: Any) -> None:
            constructor(self, *arguments, **named)
            made[kind] = self
            if len(made) == 2:
                serve(made[KVCacheManager], made[ZmqEventPublisher])

        kind.__init__ = construct

    watch(KVCacheManager)
    watch(ZmqEventPublisher)
