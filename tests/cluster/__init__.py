"""What is otherwise tested against doubles, against a Kubernetes API server: `make cluster`."""
