"""Output drivers, which send kvbus's streams to readers: to routers, to Dynamo's event plane, or to a log.

Each ``outputs[].type`` has one module or folder in this package.

A driver serves one configured output. It receives the relay's batches and answers (:mod:`kvbus.core.commands`), and
passes the requests of readers to the relay as events.

The entry point group ``kvbus.outputs`` registers the drivers, and :mod:`kvbus.config.parts` loads the driver that an
output names. ``contract`` defines what a driver has to do. ``zmq`` is the only driver without an extra. A driver may
use the core's commands and events, the configuration, and ``transport``. Code outside this package is the same for all
drivers.
"""
