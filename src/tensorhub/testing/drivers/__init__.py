"""Who decides what happens when in a simulated world: a test, a seed, or somebody's own tasks."""
