"""Reserved, and empty: metrics and a dashboard for operators will be here.

It will be responsible for turning counters and stories that the library keeps anyway into something to look at, and not for
keeping state: nothing in the library will depend on this package. Logs are in `logs`.
"""
