"""HTTP for people, probes and Prometheus."""
