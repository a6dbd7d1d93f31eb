"""Tests of kvbus and its manifests against a real Kubernetes API server (`make cluster`)."""
