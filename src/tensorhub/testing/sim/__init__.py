"""The simulated world: its parts, what each step does, what goes wrong, and the judges."""
