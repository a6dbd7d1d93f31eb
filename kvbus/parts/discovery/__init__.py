"""Ways to find engines. Each kind of ``sources[].discover`` has one module.

In: the settings of one entry, and word that an engine found has no connection. Out: complete sets of engines, each time
something has changed. An entry point ``kvbus.discovery`` registers a kind, and :mod:`kvbus.config.parts` finds it.
``contract`` says what it has to do; nothing else knows which kind it is.
"""
