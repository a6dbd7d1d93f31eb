"""Tests against a real Kubernetes API server (`make cluster`), where other tests use doubles."""
