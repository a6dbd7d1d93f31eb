"""The admin port: probes, metrics, sources, routers, blocks, events and a status page over HTTP, on aiohttp."""
