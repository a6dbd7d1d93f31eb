"""docs/spec: the clauses, the schema of payloads and the vectors, each held to what kvbus does."""
