"""The judge of a router. It acts as an engine with faults, and asks the router for its blocks after each fault."""
