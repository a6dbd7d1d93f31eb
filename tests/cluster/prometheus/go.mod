module kvbus/tests/cluster/prometheus

go 1.24.0

require github.com/prometheus/prometheus v0.308.1
