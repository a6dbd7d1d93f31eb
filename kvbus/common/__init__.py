"""What the packages around the core share, and belongs to none of them: small, and without a dependency.

Errors with their exit codes, log lines, tasks that end, counters that several write, which core runs, and that one
version of kvbus is installed. It may use the standard library alone. The core uses nothing of it.
"""
