"""kvbus as a proxy of an engine's HTTP API.

Routers and clients send their requests to kvbus. If a request asks where the engine's events are, kvbus answers with
its own endpoints. kvbus forwards every other request to the engine, and the engine's answer to the client, unchanged.
"""
