"""What builds and releases kvbus; nothing of it is installed."""
