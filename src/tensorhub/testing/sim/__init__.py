"""The simulated world: what there is, what each step does, what goes wrong, and who judges it."""
