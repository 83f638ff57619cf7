"""Ways to bring a version from a trainer to its rollouts, each as both sides of it in a process of
the testbed.

A module `NAME` has a class `System` (see `base`). What a program has to add to use that way, and no
more, stands between two comments in it, so that its lines can be counted.
"""
