"""Proxies of an engine's HTTP and gRPC APIs, which let routers find kvbus's event streams in place of the engine's.

Routers and clients send their requests for the engine to kvbus. If a request asks for the endpoints of the engine's
events, kvbus answers with its own endpoints. kvbus forwards every other request to the engine, and returns the engine's
answer unchanged.
"""
