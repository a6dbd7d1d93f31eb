"""The conformance kit: it checks from outside which clauses of docs/spec an engine's publisher or a router keeps."""
