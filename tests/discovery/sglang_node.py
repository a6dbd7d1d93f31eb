"""Run the real gRPC server of an SGLang node that has no HTTP API, from a released wheel.

Usage: ``sglang_node.py LIBRARY PORT JSON``. The program ends with its standard input.
"""

import importlib.machinery
import importlib.util
import sys


def main() -> None:
    """Serve ``GetServerInfo`` as SGLang's ``start_follower_grpc_server`` does."""
    library, port, info = sys.argv[1:]
    loader = importlib.machinery.ExtensionFileLoader("_grpc", library)
    spec = importlib.util.spec_from_loader("_grpc", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    server = module.start_metadata_server(host="127.0.0.1", port=int(port), server_info_json=info)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
