"""The conformance kit: which clauses of docs/spec an engine's publisher or a router keeps, as seen from outside."""
