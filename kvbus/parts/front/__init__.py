"""kvbus in front of an engine's HTTP API.

In: the requests of routers and clients. Out: where kvbus has the engine's events, to those who ask the engine where
its events are; everything else goes to the engine and back as it came.
"""
