"""A substitute for the JSON interface of an etcd server, with the parts that kvbus uses: keys, ranges, and leases.

A lease expires when the test says so.
"""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Etcd:
    def __init__(self) -> None:
        self.keys: dict[bytes, tuple[bytes, str]] = {}
        """The value and the lease of each key that the etcd double stores."""
        self.leases: list[str] = []
        self.fails = False
        self.says: bytes | None = None
        """Body of the answer to every request, to imitate another server at etcd's address; None to answer as etcd
        does.
        """
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status = 503 if double.fails else 200
                answer = {} if double.fails else double.answer(self.path.removeprefix("/v3/"), asked)
                body = json.dumps(answer).encode() if double.says is None else double.says
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class uses this name
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def expire(self, lease: str) -> None:
        """Let a lease expire, as etcd does: delete its keys."""
        self.leases.remove(lease)
        self.keys = {key: held for key, held in self.keys.items() if held[1] != lease}

    def answer(self, method: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of etcd 3.4 to a request. It encodes 64-bit numbers as strings."""
        key, end = (base64.b64decode(asked.get(name, "")) for name in ("key", "range_end"))
        match method:
            case "lease/grant":
                self.leases.append(str(len(self.leases) + 1))
                return {"ID": self.leases[-1], "TTL": str(asked["TTL"])}
            case "lease/keepalive":
                return {"result": {"ID": asked["ID"], **({"TTL": "10"} if asked["ID"] in self.leases else {})}}
            case "lease/revoke":
                self.expire(asked["ID"])
            case "kv/put":
                assert asked["lease"] in self.leases
                self.keys[key] = (base64.b64decode(asked["value"]), asked["lease"])
            case "kv/deleterange":
                self.keys.pop(key, None)
            case "kv/range":
                coded = [
                    {
                        "key": base64.b64encode(each).decode(),
                        "value": base64.b64encode(held[0]).decode(),
                        **({"lease": held[1]} if held[1] else {}),
                    }
                    for each, held in sorted(self.keys.items())
                    if key <= each < end
                ]
                return {"kvs": coded} if coded else {}
            case _:
                raise AssertionError(method)
        return {}
