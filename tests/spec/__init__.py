"""Tests that the clauses, the payload schema and the test vectors in docs/spec agree with kvbus."""
