"""Access to a log (Kafka, NATS or Redis), which keeps the batches of kvbus's streams even when kvbus does not run.

The package has the format of a log's records, the contract that each kind of log fulfils, and the code that reads a
stream back. Only the modules ``kafka*``, ``nats*`` and ``redis*`` depend on a server. Each needs the extra of the same
name.
"""
