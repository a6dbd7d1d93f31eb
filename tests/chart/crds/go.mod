module kvbus/tests/chart/crds

go 1.24.0

require (
	github.com/kserve/kserve v0.17.0
	github.com/prometheus-operator/prometheus-operator v0.85.0
	github.com/vllm-project/aibrix v0.7.0
	sigs.k8s.io/lws v0.8.0
)
