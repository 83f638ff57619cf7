"""What operators look at: metrics, structured logs, the dashboard.

Responsible for turning counters and stories that the library keeps anyway into something to look at.

Not responsible for keeping state: nothing in the library depends on this package.
"""
