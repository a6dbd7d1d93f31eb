"""The conformance kit: it checks which clauses of docs/spec an engine's publisher or a router keeps.

It needs no access to their code: it watches what they send, and asks a router which blocks it holds.
"""
