"""The admin port: an aiohttp server for probes, metrics, sources, routers, blocks, events and a status page."""
