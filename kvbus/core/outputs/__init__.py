"""The numbered streams of outputs, the journal for replays, and the state for routers that missed too many batches.

The package takes encoded batches and the requests of routers. It returns seqs, and the messages of each answer. The seq
of a stream never goes back, and a batch is in the journal before it is sent. The package may import all modules of the
core except the relay.
"""
